"""Memory Caching, one token and one head at a time, over the oracle of the memory it keeps."""

from __future__ import annotations

import importlib
import math
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.contract.oracles import recurrence
from tests.contract.oracles.common import Answer, heads


def shares_of(mixer, router_query: Tensor, pools: list[Tensor]) -> list[float]:
    """Return the shares of the kept segments that may be read, the oldest first, and of the open one.

    router_query: u [width], or a score for each age; pools: of the same segments, like u.
    """
    if mixer.combine == "residual":
        return [1.0] * len(pools)
    if mixer.scores == "token":
        ages = [min(len(pools) - 1 - i, mixer.ages - 1) for i in range(len(pools))]
        scores = [float(router_query[age]) / mixer.temperature for age in ages]
    else:
        scores = [float(router_query @ pool) / mixer.temperature for pool in pools]
    chosen = set(range(len(pools)))
    if mixer.combine == "ssc":
        best = sorted(range(len(pools) - 1), key=lambda i: -scores[i])[: mixer.top_k]
        chosen = {*best, len(pools) - 1}
    if mixer.gate == "softmax":
        total = sum(math.exp(scores[i]) for i in chosen)
        return [math.exp(score) / total if i in chosen else 0.0 for i, score in enumerate(scores)]
    gate = {"sigmoid": recurrence.sigmoid, "raw": float, "none": lambda score: 1.0}[mixer.gate]
    return [gate(score) if i in chosen else 0.0 for i, score in enumerate(scores)]


class Segment(NamedTuple):
    """What one head keeps of a segment, or of several as one."""

    memory: Any
    key_sum: Tensor
    tokens: int
    log_kept: float = 0.0

    def pool(self, mixer) -> Tensor:
        """Return the mean or the sum of its keys."""
        return self.key_sum / self.tokens if mixer.pooling == "mean" else self.key_sum


def digits(segments: int, levels: int) -> list[tuple[int, int, int]]:
    """Return (level, first segment, one beyond the last) for the powers of two that add up to so many segments.

    The oldest comes first; the last level takes as many of its length as there are.
    """
    found, done = [], 0
    for level in reversed(range(levels)):
        while segments - done >= 2**level:
            if found and found[-1][0] == level:
                found[-1] = (level, 0, done + 2**level)
            else:
                found.append((level, done, done + 2**level))
            done += 2**level
    return found


def joined(mixer, memory, segments: list[Segment], h: int) -> Segment:
    """Return neighbouring segments of head h as one."""
    key_sum, tokens = sum(s.key_sum for s in segments), sum(s.tokens for s in segments)
    logs = sum(s.log_kept for s in segments)
    if mixer.write == "continued":
        return Segment(segments[-1].memory, key_sum, tokens, logs)
    start = memory.begin(h)
    deep = hasattr(memory, "starts")

    def matrices(one) -> list[Tensor]:
        return one.now if deep else [one]

    changes = [torch.zeros_like(first) for first in matrices(start)]
    for segment in segments:
        left = math.exp(segment.log_kept)
        wrote = [now - first for now, first in zip(matrices(segment.memory), matrices(start), strict=True)]
        changes = [own + left * before for own, before in zip(wrote, changes, strict=True)]
    now = [first + change for first, change in zip(matrices(start), changes, strict=True)]
    if not deep:
        return Segment(now[0], key_sum, tokens, logs)
    whole = copy(start)
    whole.now = now
    return Segment(whole, key_sum, tokens, logs)


def run(mixer, model, weights: dict[str, Tensor], hidden: Tensor) -> Answer:
    """See the package's docstring; hidden [tokens, hidden_size]."""
    inner, own = mixer.memory, {name.removeprefix("memory."): w for name, w in weights.items()}
    memory = importlib.import_module(f"tests.contract.oracles.{inner.kind}").Memory(inner, model, own, hidden)
    made, state = recurrence.projections(inner, model, own, hidden)
    width = mixer.ages if mixer.scores == "token" else model.resolved_head_dim
    routed = heads(hidden, weights["router.weight"], width) if "router.weight" in weights else None
    groups, tokens, segment = model.heads // model.resolved_kv_heads, len(hidden), mixer.segment
    now = [memory.begin(h) for h in range(model.resolved_kv_heads)]
    total = torch.zeros(model.resolved_kv_heads, model.resolved_head_dim, dtype=torch.float64)
    closed: list[list[Segment]] = [[] for _ in range(model.resolved_kv_heads)]
    fades = getattr(inner, "decay", False) and mixer.lengths == "logarithmic" and mixer.write == "independent"
    log_kept = [0.0] * model.resolved_kv_heads
    keys, output = torch.zeros_like(made["key"]), []
    for t in range(tokens):
        count = t % segment + 1
        within = t // segment * segment
        if mixer.max_chunks is not None:
            reach = min(within, t % model.chunk_size // segment * segment + mixer.max_chunks * model.chunk_size)
        else:
            reach = within
        first = (within - reach) // segment
        for h in range(model.resolved_kv_heads):
            keys[t, h] = memory.prepare(made["key"][t, h], t)
            now[h] = memory.write(now[h], t, h, keys[t, h], made["value"][t, h])
            total[h] += keys[t, h]
            if fades:
                log_kept[h] += math.log(memory.gates[t, h]["decay"])
        reads = []
        for h in range(model.heads):
            g, query = h // groups, memory.ask(made["query"][t, h], t)
            router_query = memory.prepare(made["query"][t, h], t) if routed is None else routed[t, h]
            readable = closed[g][first:]
            if mixer.lengths == "logarithmic":
                stretches = digits(len(closed[g]), mixer.levels)
                readable = [joined(mixer, memory, closed[g][begin:end], g) for _, begin, end in stretches]
            readable = [*readable, Segment(now[g], total[g], count)]
            shares = shares_of(mixer, router_query, [segment.pool(mixer) for segment in readable])
            memories = [segment.memory for segment in readable]
            if mixer.combine == "soup":
                reads.append(memory.read(memory.mixture(list(zip(shares, memories, strict=True))), query))
            else:
                answers = (share * memory.read(m, query) for share, m in zip(shares, memories, strict=True))
                reads.append(sum(answers))
        reads = [read + memory.beside(made["value"][t, h // groups], h // groups) for h, read in enumerate(reads)]
        output.append(recurrence.finished(inner, model, own, hidden[t], reads))
        if count == segment:
            for h in range(model.resolved_kv_heads):
                closed[h].append(Segment(memory.closed(now[h]), total[h].clone(), segment, log_kept[h]))
                total[h], log_kept[h] = 0, 0.0
                if mixer.write == "independent":
                    now[h] = memory.begin(h)
    return Answer(
        torch.stack(output),
        {
            **memory.state(now, keys, made["value"]),
            **state,
            "key_sum": total[None].clone(),
            **({"log_kept": torch.tensor(log_kept, dtype=torch.float64)[None]} if fades else {}),
            **(kept_state if mixer.lengths == "constant" else level_state)(mixer, model, memory, closed),
        },
    )


def level_state(mixer, model, memory, closed: list[list[Segment]]) -> dict[str, Tensor]:
    """Return what each level holds of each head; zeros where it is empty."""
    fades = getattr(mixer.memory, "decay", False) and mixer.write == "independent"
    state = {}
    for level in range(mixer.levels):
        names = {**memory.kept(memory.begin(0)), "key_sum": torch.zeros(model.resolved_head_dim, dtype=torch.float64)}
        if fades:
            names["log_kept"] = torch.zeros((), dtype=torch.float64)
        for name, like in names.items():
            held = []
            for h, segments in enumerate(closed):
                found = [stretch for stretch in digits(len(segments), mixer.levels) if stretch[0] == level]
                if not found:
                    held.append(torch.zeros_like(like))
                    continue
                whole = joined(mixer, memory, segments[found[0][1] : found[0][2]], h)
                log_kept = torch.tensor(whole.log_kept, dtype=torch.float64)
                held.append({**memory.kept(whole.memory), "key_sum": whole.key_sum, "log_kept": log_kept}[name])
            state[f"level_{level}_{name}"] = torch.stack(held)[None]
    return state


def kept_state(mixer, model, memory, closed) -> dict:
    """Return the list of whole chunks within reach, and the segments of the open one."""

    def columns(part: slice) -> dict[str, Tensor]:
        """Return some segments of all heads as one entry."""
        heads = [[{**memory.kept(s.memory), "pool": s.pool(mixer)} for s in head[part]] for head in closed]
        names = [*memory.kept(memory.begin(0)), "pool"]
        count = len(heads[0])
        found = {}
        for name in names:
            like = {**memory.kept(memory.begin(0)), "pool": torch.zeros(model.resolved_head_dim)}[name]
            each = [column[name] for head in heads for column in head]
            stacked = torch.stack(each) if each else torch.zeros(0, *like.shape, dtype=torch.float64)
            found[name] = stacked.reshape(1, model.resolved_kv_heads, count, *like.shape)
        return {**found, "filled": torch.ones(1, count, dtype=torch.float64)}

    per = model.chunk_size // mixer.segment
    whole = len(closed[0]) // per
    first = 0 if mixer.max_chunks is None else max(0, whole - mixer.max_chunks)
    entries = [columns(slice(i * per, (i + 1) * per)) for i in range(first, whole)]
    open_ones = columns(slice(whole * per, None))
    return {"kept": entries, **{f"closed_{name}": tensor for name, tensor in open_ones.items()}}
