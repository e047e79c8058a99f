"""Causal attention over the document so far, or over the open chunk and the `max_chunks` before it."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.contract.oracles.common import Answer, attend, columns, projected, rotary


def run(mixer, model, weights: dict[str, Tensor], hidden: Tensor) -> Answer:
    """See the package's docstring; hidden [tokens, hidden_size]."""
    chunk = model.chunk_size
    query, key, value = (projected(model, weights, hidden, n) for n in ("query", "key", "value"))
    rotated = torch.stack([torch.stack([rotary(k, t, model.rope_theta) for k in key[t]]) for t in range(len(hidden))])
    output = []
    for t in range(len(hidden)):
        first = 0 if mixer.max_chunks is None else max(0, (t // chunk - mixer.max_chunks) * chunk)
        mixed = []
        for h in range(model.heads):
            g = h // (model.heads // model.resolved_kv_heads)
            q = rotary(query[t, h], t, model.rope_theta)
            mixed.append(attend(q, list(rotated[first : t + 1, g]), list(value[first : t + 1, g])))
        output.append(weights["output.weight"] @ torch.cat(mixed))
    done = len(hidden) // chunk
    kept = range(0 if mixer.max_chunks is None else max(0, done - mixer.max_chunks), done)
    past = [
        {"keys": columns(rotated, c * chunk, (c + 1) * chunk), "values": columns(value, c * chunk, (c + 1) * chunk)}
        for c in kept
    ]
    state = {
        "past": past,
        "open_keys": columns(rotated, done * chunk, len(hidden)),
        "open_values": columns(value, done * chunk, len(hidden)),
    }
    return Answer(torch.stack(output), state)
