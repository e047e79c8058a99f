"""Compressive Transformer, one query at a time, with the scores of Transformer-XL.

Token t, in the chunk that begins at s, sees the compressed vectors, the cache of the M tokens before s and its chunk so
far: one list of vectors, the last of them at distance 0, the one before it at distance 1, and so on. At the end of a
chunk of L tokens, if the cache is full, its oldest L vectors e_0 ... e_(L-1) leave it and become L / R vectors:

convolution  c_g = b + sum_k W_k e_(gR + k)
dilated      c_g = b + sum_k W_k e_(gR + R - 1 - 2 (R - 1 - k)), zeros before e_0
mean, max    of e_(gR) ... e_(gR + R - 1), channel by channel
most_used    those L / R of them that got most attention, of all queries and heads, in the order they stood in

Reconstruction, for each finished chunk that compresses: the mean, over the chunk's queries, heads and channels, of the
squared difference of attention to keys and values of c and to those of e, without positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tests.contract.oracles.common import Answer, attend, projected
from tests.contract.oracles.transformer_xl import shares


def compress(mixer, weights: dict[str, Tensor], evicted: list[Tensor], attention: list[float]) -> list[Tensor]:
    """Return the vectors that `evicted` ones become, which got so much attention each."""
    ratio, zero = mixer.ratio, torch.zeros_like(evicted[0])
    if mixer.compression == "most_used":
        ranked = sorted(range(len(evicted)), key=lambda i: -attention[i])[: len(evicted) // ratio]
        return [evicted[i] for i in sorted(ranked)]
    made = []
    for g in range(len(evicted) // ratio):
        group = evicted[g * ratio : (g + 1) * ratio]
        if mixer.compression == "mean":
            made.append(sum(group) / ratio)
        elif mixer.compression == "max":
            made.append(torch.stack(group).amax(0))
        else:
            step = 2 if mixer.compression == "dilated" else 1
            places = [(g + 1) * ratio - 1 - step * (ratio - 1 - k) for k in range(ratio)]
            kernel = weights["compressor.weight"].view(len(zero), ratio, -1)
            total = weights["compressor.bias"].clone()
            for k, place in enumerate(places):
                total += kernel[:, k] @ (evicted[place] if place >= 0 else zero)
            made.append(total)
    return made


def run(mixer, model, weights: dict[str, Tensor], hidden: Tensor) -> Answer:
    """See the package's docstring; hidden [tokens, hidden_size]."""
    chunk = model.chunk_size
    length, capacity = mixer.memory_length or chunk, mixer.compressed_length or chunk
    clamp = mixer.clamp_length or 10**9
    groups = model.heads // model.resolved_kv_heads
    cache: list[Tensor] = []
    attention: list[float] = []
    compressed: list[Tensor] = []
    outputs, reconstruction = [], 0.0
    query = projected(model, weights, hidden, "query")
    for t in range(len(hidden)):
        begin = t - t % chunk
        columns = torch.stack([*compressed, *cache, *hidden[begin : t + 1]])
        key, value = (projected(model, weights, columns, name) for name in ("key", "value"))
        distances = [min(len(columns) - 1 - j, clamp) for j in range(len(columns))]
        mixed = []
        for h in range(model.heads):
            p = shares(query[t, h], h, list(key[:, h // groups]), distances, weights)
            mixed.append(sum(share * v for share, v in zip(p, value[:, h // groups], strict=True)))
            for i in range(len(cache)):
                attention[i] += p[len(compressed) + i]
        outputs.append(weights["output.weight"] @ torch.cat(mixed))
        if (t + 1) % chunk:
            continue
        if len(cache) == length:
            evicted, cache = cache[:chunk], cache[chunk:]
            made = compress(mixer, weights, evicted, attention)
            attention = attention[chunk:]
            compressed = [*compressed, *made][-capacity:]
            old, new = (
                [projected(model, weights, torch.stack(vectors), name) for name in ("key", "value")]
                for vectors in (evicted, made)
            )
            for i in range(begin, t + 1):
                for h in range(model.heads):
                    g = h // groups
                    wanted = attend(query[i, h], list(old[0][:, g]), list(old[1][:, g]))
                    got = attend(query[i, h], list(new[0][:, g]), list(new[1][:, g]))
                    reconstruction += float((got - wanted).square().mean()) / model.heads / chunk
        cache, attention = [*cache, *hidden[begin : t + 1]], [*attention, *[0.0] * chunk]
    done = len(hidden) - len(hidden) % chunk

    def filled(vectors: list[Tensor], count: int) -> Tensor:
        """Return `count` rows [count, 1, hidden_size], the vectors last and zeros before them."""
        zeros = torch.zeros(count - len(vectors), hidden.shape[1], dtype=hidden.dtype)
        return torch.cat((zeros, *(v[None] for v in vectors)))[:, None]

    state = {
        "memory": filled(cache, length),
        "compressed": filled(compressed, capacity),
        "open_hidden": hidden[done:, None],
    }
    if mixer.compression == "most_used":
        state["attention"] = torch.tensor([0.0] * (length - len(cache)) + attention, dtype=hidden.dtype)[:, None]
    losses = {}
    if mixer.compression in ("convolution", "dilated"):
        losses["reconstruction"] = mixer.reconstruction_weight * reconstruction * chunk
    return Answer(torch.stack(outputs), state, losses)
