"""Log-linear attention, one token and one head at a time: what each segment has written is followed by itself.

At each token the level of every earlier segment is found anew, and those of a level are read as one memory: the sum of
what is left of each. Guo et al., "Log-Linear Attention", 2025: the level of segment i before segment n is that of a
Fenwick tree (weak), or the place to which a cascade of bounded levels has moved it (strong).
"""

from __future__ import annotations

import importlib
import math
from copy import copy

import torch
from torch import Tensor

from tests.contract.oracles import recurrence
from tests.contract.oracles.common import Answer


def weak_level(n: int, i: int) -> int:
    """Return the Fenwick tree's level of segment i after n: the largest power of two is cut off the front first."""
    level = int(math.log2(n))
    return level if i < 2**level else weak_level(n - 2**level, i - 2**level)


def strong_level(n: int, i: int) -> int:
    """Return the level in which a cascade leaves segment i after n: level l holds at most 2^l segments.

    A segment enters level 0; a level that would overflow takes in what comes, and hands on what it held.
    """
    held: list[list[int]] = []
    for segment in range(n):
        coming, level = [segment], 0
        while True:
            if level == len(held):
                held.append([])
            if len(held[level]) + len(coming) <= 2**level:
                held[level] += coming
                break
            held[level], coming = coming, held[level]
            level += 1
    return next(level for level, segments in enumerate(held) if i in segments)


class Changes:
    """The difference of a memory to the one that documents start from, as a list of tensors; and the way back."""

    def __init__(self, memory, keys: Tensor) -> None:
        """keys: of the tokens so far, [tokens, kv_heads, width]."""
        self.memory, self.keys = memory, keys
        self.deep = hasattr(memory, "starts")

    def of(self, kept, h: int) -> list[Tensor]:
        """Return what has been added to the memory of head h."""
        if not self.deep:
            return [kept]
        return [now - start[h] for now, start in zip(kept.now, self.memory.starts, strict=True)]

    def undone(self, changes: list[Tensor], h: int):
        """Return the memory of head h to which this was added; changes like `of`."""
        if not self.deep:
            return changes[0]
        fresh = copy(self.memory.begin(h))
        fresh.now = [change + start[h] for change, start in zip(changes, self.memory.starts, strict=True)]
        return fresh

    def left(self, changes: list[Tensor], t: int, h: int) -> list[Tensor]:
        """Return what token t leaves of changes like `of`: what it makes of a memory if it writes zeros."""
        if self.deep:
            return [self.memory.gates[t, h]["decay"] * change for change in changes]
        # a normalizer takes in every token, whatever its value; the memory beside it does not fade
        if getattr(self.memory.mixer, "normalizer", False):
            return changes
        zeros = torch.zeros(changes[0].shape[-1], dtype=torch.float64)
        return [self.memory.write(changes[0], t, h, self.keys[t, h], zeros)]

    def transition(self, size: int, tokens: range, h: int) -> Tensor:
        """Return the product of what tokens leave less the whole, [size, size]."""
        width = 1 if self.deep else self.keys.shape[-1]
        whole = [torch.eye(width, dtype=torch.float64)]
        for t in tokens:
            whole = self.left(whole, t, h)
        return (whole[0] - torch.eye(width))[:size, :size]


def total(parts: list[list[Tensor]]) -> list[Tensor]:
    """Return the sums of several changes, matrix by matrix."""
    return [sum(each) for each in zip(*parts, strict=True)]


def run(mixer, model, weights: dict[str, Tensor], hidden: Tensor) -> Answer:
    """See the package's docstring; hidden [tokens, hidden_size]."""
    inner, own = mixer.memory, {name.removeprefix("memory."): w for name, w in weights.items()}
    memory = importlib.import_module(f"tests.contract.oracles.{inner.kind}").Memory(inner, model, own, hidden)
    made, state = recurrence.projections(inner, model, own, hidden)
    kv_heads, groups = model.resolved_kv_heads, model.heads // model.resolved_kv_heads
    keys, output, count = torch.zeros_like(made["key"]), [], mixer.levels + 1
    changes = Changes(memory, keys)
    now = [memory.begin(h) for h in range(kv_heads)]
    # of each head, what each ended segment has written; left[h][i][j]: after segments i + 1 .. i + j
    left: list[list[list[list[Tensor]]]] = [[] for _ in range(kv_heads)]
    # the same as the tokens so far have left it
    fading: list[list[list[Tensor]]] = [[] for _ in range(kv_heads)]
    level_of = weak_level if mixer.admissibility == "weak" else strong_level

    def levels(segments: int) -> dict[int, list[int]]:
        """Return the segments of each level, after so many; the last takes in what is older."""
        found: dict[int, list[int]] = {}
        for i in range(segments):
            found.setdefault(min(level_of(segments, i), mixer.levels - 1), []).append(i)
        return found

    def held(h: int, stretch: list[int]) -> list[Tensor]:
        """Return what a level holds of head h: what its later segments, or all later tokens, have left of each."""
        if mixer.closed == "faded":
            return total([fading[h][i] for i in stretch])
        return total([left[h][i][stretch[-1] - i] for i in stretch])

    for t in range(len(hidden)):
        cut = levels(t // mixer.segment)
        for h in range(kv_heads):
            keys[t, h] = memory.prepare(made["key"][t, h], t)
            now[h] = memory.write(now[h], t, h, keys[t, h], made["value"][t, h])
            if mixer.closed == "faded":
                fading[h] = [changes.left(change, t, h) for change in fading[h]]
        reads = []
        for h in range(model.heads):
            g, query = h // groups, memory.ask(made["query"][t, h], t)
            projected = weights["level_gates.weight.weight"][h * count : (h + 1) * count] @ hidden[t]
            gates = [recurrence.softplus(float(x)) for x in weights["level_gates.factor"][h] * projected]
            read = gates[0] * memory.read(now[g], query)
            for level, stretch in cut.items():
                read = read + gates[level + 1] * memory.read(changes.undone(held(g, stretch), g), query)
            reads.append(read + memory.beside(made["value"][t, g], g))
        output.append(recurrence.finished(inner, model, own, hidden[t], reads))
        if (t + 1) % mixer.segment == 0:
            for h in range(kv_heads):
                if mixer.closed == "faded":
                    fading[h].append(changes.of(now[h], h))
                else:
                    follow(changes, left[h], range(t + 1 - mixer.segment, t + 1), h)
                    left[h].append([changes.of(now[h], h)])
                now[h] = memory.begin(h)
    state |= memory.state(now, keys, made["value"])
    cut = levels(len(hidden) // mixer.segment)
    for i, name in enumerate(memory.kept(memory.begin(0))):
        shape = changes.of(memory.begin(0), 0)[i].shape
        found = torch.zeros(1, kv_heads, mixer.levels, *shape, dtype=torch.float64)
        for h in range(kv_heads):
            for level, stretch in cut.items():
                found[0, h, level] = held(h, stretch)[i]
        state[f"level_{name}"] = found
    return Answer(torch.stack(output), {**state, **transitions(mixer, model, changes, cut, len(hidden))})


def follow(changes: Changes, left: list[list[list[Tensor]]], tokens: range, h: int) -> None:
    """Append what a segment's tokens leave of what each earlier segment of head h has written."""
    for change in left:
        last = change[-1]
        for t in tokens:
            last = changes.left(last, t, h)
        change.append(last)


def transitions(mixer, model, changes: Changes, cut: dict[int, list[int]], tokens: int) -> dict[str, Tensor]:
    """Return those of the open segment and of each level, if levels are kept; cut: the segments of each level."""
    inner = mixer.memory
    size = int(inner.kind in ("retnet", "ssd") or getattr(inner, "decay", False))
    if inner.kind == "delta_net":
        size = model.resolved_head_dim
    if mixer.closed == "faded" or not size:
        return {}
    heads = range(model.resolved_kv_heads)
    open_tokens = range(tokens - tokens % mixer.segment, tokens)
    found = torch.zeros(1, len(heads), mixer.levels, size, size, dtype=torch.float64)
    for h in heads:
        for level, stretch in cut.items():
            inside = range(stretch[0] * mixer.segment, (stretch[-1] + 1) * mixer.segment)
            found[0, h, level] = changes.transition(size, inside, h)
    open_ones = torch.stack([changes.transition(size, open_tokens, h) for h in heads])
    return {"transition": open_ones[None], "level_transition": found}
