"""Memorizing Transformer, one token and one head at a time, the queue a list from which the oldest are removed.

Mix:    sigmoid: g read + (1 - g) local, g = 1 / (1 + e^-b_h), each a softmax of its own; local alone while the queue is
        empty. none: one softmax over the queue's keys and the block's.
Read:   keys as projected; the query is the one before rotation with a gate, the rotated one without.
        topk: only the keys with the largest q . k.
Window: local attention sees the last `window` tokens, rotated by their places, and the block at least. What the query
        sees there is not in the one softmax again; a softmax of the queue's own has it.
Scale:  with normalize_keys q and k are divided by their lengths and q . k / sqrt(width) becomes e^(s_h) cos(q, k).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.contract.oracles.common import Answer, attend, columns, projected, rotary


def normalized(query: Tensor, key: Tensor, log_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Scale queries and keys [tokens, heads, width] such that q . k / sqrt(width) = e^s cos; log_scale: s [heads]."""
    width = query.shape[-1]
    query, key = query.clone(), key.clone()
    for t in range(len(query)):
        for h in range(query.shape[1]):
            factor = math.exp(float(log_scale[h])) * math.sqrt(width)
            query[t, h] *= factor / math.sqrt(float(query[t, h] @ query[t, h]))
        for h in range(key.shape[1]):
            key[t, h] /= math.sqrt(float(key[t, h] @ key[t, h]))
    return query, key


def best(mixer, query: Tensor, entries: list[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the keys and values of the queue that a query [width] reads."""
    if mixer.retrieval == "topk":
        entries = sorted(entries, key=lambda entry: -float(query @ entry[0]))[: mixer.top_k]
    return [key for key, _ in entries], [value for _, value in entries]


def run(mixer, model, weights: dict[str, Tensor], hidden: Tensor) -> Answer:
    """See the package's docstring; hidden [tokens, hidden_size]."""
    block = mixer.block or model.chunk_size
    query, key, value = (projected(model, weights, hidden, n) for n in ("query", "key", "value"))
    if mixer.normalize_keys:
        query, key = normalized(query, key, weights["cosine_scale.log"])
    queue: list[int] = []
    output = []
    for t in range(len(hidden)):
        first = t - t % block
        mixed = []
        for h in range(model.heads):
            g = h // (model.heads // model.resolved_kv_heads)
            q = rotary(query[t, h], t - first, model.rope_theta)
            near = [j for j in range(t + 1) if j >= first or (mixer.window is not None and t - j < mixer.window)]
            keys = [rotary(key[j, g], j - first, model.rope_theta) for j in near]
            values = [value[j, g] for j in near]
            entries = [(key[j, g], value[j, g]) for j in queue if mixer.gate == "sigmoid" or j not in near]
            if mixer.gate == "none":
                memory_keys, memory_values = best(mixer, q, entries)
                mixed.append(attend(q, memory_keys + keys, memory_values + values))
            else:
                local = attend(q, keys, values)
                if queue:
                    gate = 1 / (1 + math.exp(-float(weights["gate.logit"][h])))
                    local = gate * attend(query[t, h], *best(mixer, query[t, h], entries)) + (1 - gate) * local
                mixed.append(local)
        output.append(weights["output.weight"] @ torch.cat(mixed))
        if (t + 1) % block == 0:
            queue += range(first, t + 1)
            while len(queue) > mixer.queue:
                queue.pop(0)
    state = {
        "open_keys": columns(key, len(hidden) - len(hidden) % block, len(hidden)),
        "open_values": columns(value, len(hidden) - len(hidden) % block, len(hidden)),
    }
    for name, rows in (("keys", key), ("values", value)):
        kept = torch.zeros(mixer.queue, 1, model.resolved_kv_heads, model.resolved_head_dim, dtype=torch.float64)
        for place, j in enumerate(queue):
            kept[mixer.queue - len(queue) + place, 0] = rows[j]
        state[name] = kept
    return Answer(torch.stack(output), state)
