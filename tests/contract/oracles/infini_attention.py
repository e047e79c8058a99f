"""Infini-Transformer, one token and one head at a time.

Read:   sum_i sigma(q)_i M[i] / sum_i sigma(q)_i z_i, then divided by its root mean square (`normalize`).
Mix:    g read + (1 - g) local, g = 1 / (1 + e^-beta_h); local alone before the first write.
Write:  after each block, each token k, v of it: M += sigma(k) (v - what k reads from the memory before the block)^T,
        z += sigma(k); nothing is subtracted by the first block, nor ever by `linear`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.contract.oracles.common import Answer, attend, columns, projected, rotary


def sigma(vector: Tensor) -> list[float]:
    """Return ELU + 1 of a vector [width]."""
    return [x + 1 if x > 0 else math.exp(x) for x in vector.tolist()]


def read(vector: Tensor, M: Tensor, z: Tensor) -> Tensor:
    """Return what M [width, width] and z [width] hold for a query or key, a vector like `z`."""
    s = sigma(vector)
    above = sum((a * row for a, row in zip(s, M, strict=True)), torch.zeros_like(vector))
    return above / sum(a * float(b) for a, b in zip(s, z, strict=True))


def run(mixer, model, weights: dict[str, Tensor], hidden: Tensor) -> Answer:
    """See the package's docstring; hidden [tokens, hidden_size]."""
    block = mixer.block or model.chunk_size
    query, key, value = (projected(model, weights, hidden, n) for n in ("query", "key", "value"))
    M = torch.zeros(model.resolved_kv_heads, model.resolved_head_dim, model.resolved_head_dim, dtype=torch.float64)
    z = torch.zeros(model.resolved_kv_heads, model.resolved_head_dim, dtype=torch.float64)
    output = []
    for t in range(len(hidden)):
        first = t - t % block
        mixed = []
        for h in range(model.heads):
            g = h // (model.heads // model.resolved_kv_heads)
            q = rotary(query[t, h], t - first, model.rope_theta)
            keys = [rotary(key[j, g], j - first, model.rope_theta) for j in range(first, t + 1)]
            local = attend(q, keys, [value[j, g] for j in range(first, t + 1)])
            if first > 0:
                memory = read(query[t, h], M[g], z[g])
                if mixer.normalize:
                    mean_square = sum(x * x for x in memory.tolist()) / len(memory)
                    memory = memory / math.sqrt(mean_square + model.norm_eps)
                gate = 1 / (1 + math.exp(-float(weights["gate.logit"][h])))
                local = gate * memory + (1 - gate) * local
            mixed.append(local)
        output.append(weights["output.weight"] @ torch.cat(mixed))
        if (t + 1) % block == 0:
            before, total = M.clone(), z.clone()
            for j in range(first, t + 1):
                for g in range(model.resolved_kv_heads):
                    new = value[j, g]
                    if mixer.update == "delta" and first > 0:
                        new = new - read(key[j, g], before[g], total[g])
                    for i, s in enumerate(sigma(key[j, g])):
                        M[g, i] += s * new
                        z[g, i] += s
    done = len(hidden) - len(hidden) % block
    state = {
        "associations": M[None],
        "mass": z[None],
        "open_keys": columns(key, done, len(hidden)),
        "open_values": columns(value, done, len(hidden)),
    }
    return Answer(torch.stack(output), state)
