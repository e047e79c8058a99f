"""Melodi within a layer, one query at a time.

Read:   a token sees the vectors of the memory m (keys W_k m_s and values W_v m_s, no positions) and its block up to
        itself, at positions 0, 1, ... of the block; the first block of a document has no memory.
Write:  when a block of L tokens is finished, the query of summary token s is W_q n_s with n_s = u_s / rms(u_s), at
        position L; it sees the old memory, the L tokens and all summary tokens. With z_t and z_s what tokens and
        summaries got from their heads,
        m_s = v / rms(v),  v = u_s + W_o (z_s + sum_t M[t, s] z_t + sum_r M[L + r, s] z_r).
Long:   a new memory m leaves entries e_j = v / rms(v), v = sum_s N[s, j] m_s, as keys W_k e_j and values W_v e_j in a
        list from which the oldest are removed. Tokens and summary tokens look at it with the query before rotation;
        what a head put out becomes (1 - g) out + g read, g = 1 / (1 + e^-b) of each channel; unchanged with no entries.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.contract.oracles.common import Answer, attend, columns, projected, rotary


def normed(vector: Tensor, eps: float) -> Tensor:
    """Return a vector [width] divided by its root mean square."""
    mean = sum(float(x) ** 2 for x in vector) / len(vector)
    return vector / math.sqrt(mean + eps)


def look(model, query: Tensor, position: int, memory, keys, values) -> Tensor:
    """Return what all heads of one query [heads, width] get, joined; keys, values: lists of (position, vectors)."""
    mixed = []
    for h in range(model.heads):
        g = h // (model.heads // model.resolved_kv_heads)
        seen_keys = [rotary(k[g], at, model.rope_theta) for at, k in keys]
        seen_values = [v[g] for _, v in values]
        if memory is not None:
            seen_keys, seen_values = [*memory[0][:, g], *seen_keys], [*memory[1][:, g], *seen_values]
        mixed.append(attend(rotary(query[h], position, model.rope_theta), seen_keys, seen_values))
    return torch.cat(mixed)


def look_long(model, query: Tensor, got: Tensor, bias: Tensor, entries: list) -> Tensor:
    """Return `got` [heads * width] of a query [heads, width], mixed with what it reads of the long memory."""
    if not entries:
        return got
    got = got.clone().view(model.heads, model.resolved_head_dim)
    for h in range(model.heads):
        g = h // (model.heads // model.resolved_kv_heads)
        read = attend(query[h], [key[g] for key, _ in entries], [value[g] for _, value in entries])
        for c in range(model.resolved_head_dim):
            gate = 1 / (1 + math.exp(-float(bias[h, c])))
            got[h, c] = (1 - gate) * got[h, c] + gate * read[c]
    return got.flatten()


def run(mixer, model, weights: dict[str, Tensor], hidden: Tensor) -> Answer:
    """See the package's docstring; hidden [tokens, hidden_size]."""
    block, count = mixer.block or model.chunk_size, mixer.summaries
    u, mixing, back = weights["summaries.weight"], weights["mixing.weight"], weights["output.weight"]
    query, key, value = (projected(model, weights, hidden, n) for n in ("query", "key", "value"))
    n = torch.stack([normed(vector, model.norm_eps) for vector in u])
    u_query, u_key, u_value = (projected(model, weights, n, name) for name in ("query", "key", "value"))
    m = torch.zeros(count, model.hidden_size, dtype=torch.float64)
    memory, got, entries = None, [], []
    bias = weights.get("gate.logit")
    for t in range(len(hidden)):
        first = t - t % block
        keys = [(j - first, key[j]) for j in range(first, t + 1)]
        values = [(j - first, value[j]) for j in range(first, t + 1)]
        z = look(model, query[t], t - first, memory, keys, values)
        got.append(look_long(model, query[t], z, bias, entries))
        if (t + 1) % block == 0:
            keys += [(block, u_key[s]) for s in range(count)]
            values += [(block, u_value[s]) for s in range(count)]
            summaries = [look(model, u_query[s], block, memory, keys, values) for s in range(count)]
            summaries = [look_long(model, u_query[s], z, bias, entries) for s, z in enumerate(summaries)]
            everything = [*got[first : t + 1], *summaries]
            for s in range(count):
                mixed = summaries[s] + sum(mixing[i, s] * z for i, z in enumerate(everything))
                m[s] = normed(u[s] + back @ mixed, model.norm_eps)
            memory = tuple(projected(model, weights, m, name) for name in ("key", "value"))
            if mixer.long_memory is not None:
                mixed = [
                    sum(n_s * m_s for n_s, m_s in zip(w, m, strict=True)) for w in weights["long_entries.weight"].T
                ]
                new = torch.stack([normed(vector, model.norm_eps) for vector in mixed])
                entries += zip(
                    *(projected(model, weights, new, name) for name in ("key", "value")),
                    strict=True,
                )
                while len(entries) > mixer.long_memory:
                    entries.pop(0)
    done, z = len(hidden) - len(hidden) % block, torch.stack(got)
    state = {
        "memory": m[:, None],
        "open_keys": columns(key, done, len(hidden)),
        "open_values": columns(value, done, len(hidden)),
        "open_outputs": columns(z.unflatten(1, (model.heads, model.resolved_head_dim)), done, len(hidden)),
    }
    if mixer.long_memory is not None:
        for side, name in enumerate(("long_keys", "long_values")):
            kept = torch.zeros(
                mixer.long_memory, 1, model.resolved_kv_heads, model.resolved_head_dim, dtype=torch.float64
            )
            for place, entry in enumerate(entries):
                kept[mixer.long_memory - len(entries) + place, 0] = entry[side]
            state[name] = kept
    return Answer(torch.stack([back @ vector for vector in got]), state)
