"""Transformer-XL, one query at a time.

Token t of a document, in the chunk that begins at s, sees tokens max(0, s - M) .. t (with `same_length` the last M of
them). Its score for token j is ((q + u) . k_j + (q + v) . W_r w_d) / sqrt(width), d = min(t - j, clamp), where w_d
holds the sines of d / 10000^(2i / hidden_size) and then their cosines.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.contract.oracles.common import Answer, projected


def wave(distance: int, width: int) -> Tensor:
    """Return sines, then cosines, of one distance: [width]."""
    angles = [distance / 10_000 ** (2 * i / width) for i in range(width // 2)]
    return torch.tensor([*map(math.sin, angles), *map(math.cos, angles)], dtype=torch.float64)


def shares(query: Tensor, head: int, keys: list[Tensor], distances: list[int], weights) -> list[float]:
    """Return how much of its attention one head's query [width] gives to each of keys [width] at their distances."""
    u, v = weights["biases.content"][head], weights["biases.distance"][head]
    of_distances = weights["distance_key.weight"].view(len(weights["biases.content"]), len(query), -1)[head]
    scores = [
        (float((query + u) @ key) + float((query + v) @ (of_distances @ wave(d, of_distances.shape[1]))))
        / math.sqrt(len(query))
        for key, d in zip(keys, distances, strict=True)
    ]
    total = sum(math.exp(score) for score in scores)
    return [math.exp(score) / total for score in scores]


def run(mixer, model, weights: dict[str, Tensor], hidden: Tensor) -> Answer:
    """See the package's docstring; hidden [tokens, hidden_size]."""
    chunk = model.chunk_size
    length = chunk if mixer.memory_length is None else mixer.memory_length
    query, key, value = (projected(model, weights, hidden, name) for name in ("query", "key", "value"))
    clamp = mixer.clamp_length or len(hidden)
    outputs = []
    for t in range(len(hidden)):
        begin = t - t % chunk
        seen = range(max(0, begin - length), t + 1)
        if mixer.same_length:
            seen = seen[-length:]
        mixed = []
        for h in range(model.heads):
            g = h // (model.heads // model.resolved_kv_heads)
            distances = [min(t - j, clamp) for j in seen]
            p = shares(query[t, h], h, [key[j, g] for j in seen], distances, weights)
            mixed.append(sum(share * value[j, g] for share, j in zip(p, seen, strict=True)))
        outputs.append(weights["output.weight"] @ torch.cat(mixed))
    done = len(hidden) - len(hidden) % chunk
    memory = torch.cat((torch.zeros(length, hidden.shape[1], dtype=hidden.dtype), hidden[:done]))[done:]
    return Answer(torch.stack(outputs), {"memory": memory[:, None], "open_hidden": hidden[done:, None]})
