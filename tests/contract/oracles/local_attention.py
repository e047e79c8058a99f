"""Causal attention within blocks of fixed size; rotary positions restart with each block."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.contract.oracles.common import Answer, attend, columns, projected, rotary


def run(mixer, model, weights: dict[str, Tensor], hidden: Tensor) -> Answer:
    """See the package's docstring; hidden [tokens, hidden_size]."""
    block = mixer.block or model.chunk_size
    query, key, value = (projected(model, weights, hidden, n) for n in ("query", "key", "value"))
    output = []
    for t in range(len(hidden)):
        first = t - t % block
        mixed = []
        for h in range(model.heads):
            g = h // (model.heads // model.resolved_kv_heads)
            q = rotary(query[t, h], t - first, model.rope_theta)
            keys = [rotary(key[j, g], j - first, model.rope_theta) for j in range(first, t + 1)]
            mixed.append(attend(q, keys, [value[j, g] for j in range(first, t + 1)]))
        output.append(weights["output.weight"] @ torch.cat(mixed))
    done = len(hidden) - len(hidden) % block
    state = {
        "open_keys": columns(key, done, len(hidden)),
        "open_values": columns(value, done, len(hidden)),
    }
    return Answer(torch.stack(output), state)
