"""Causal attention to the last `window` tokens, the query's own included."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.contract.oracles.common import Answer, attend, projected, rotary


def run(mixer, model, weights: dict[str, Tensor], hidden: Tensor) -> Answer:
    """See the package's docstring; hidden [tokens, hidden_size]."""
    window = mixer.window or model.chunk_size
    query, key, value = (projected(model, weights, hidden, n) for n in ("query", "key", "value"))
    rotated = torch.stack([torch.stack([rotary(k, t, model.rope_theta) for k in key[t]]) for t in range(len(hidden))])
    output = []
    for t in range(len(hidden)):
        seen = [i for i in range(t + 1) if t - i < window]
        mixed = []
        for h in range(model.heads):
            g = h // (model.heads // model.resolved_kv_heads)
            q = rotary(query[t, h], t, model.rope_theta)
            mixed.append(attend(q, [rotated[i, g] for i in seen], [value[i, g] for i in seen]))
        output.append(weights["output.weight"] @ torch.cat(mixed))

    def last(x: Tensor) -> Tensor:
        """Return the last window - 1 tokens of x [tokens, kv_heads, width], zeros before the first."""
        padded = torch.cat((torch.zeros(window - 1, *x.shape[1:], dtype=x.dtype), x))
        return padded[len(x) :][:, None]

    return Answer(torch.stack(output), {"keys": last(rotated), "values": last(value)})
