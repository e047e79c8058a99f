"""Log-linear attention, one token and one head at a time: at each token its past is cut up anew.

n segments lie before the open one. The last level's length times its count of whole ones is read as one memory, then
the binary digits of the rest, largest first.
"""

from __future__ import annotations

import importlib
import math
from copy import copy

import torch
from torch import Tensor

from tests.contract.oracles import recurrence
from tests.contract.oracles.common import Answer


def cut(segments: int, levels: int) -> list[tuple[int, int, int]]:
    """Return (level, first segment, one beyond the last) of each stretch, the oldest first."""
    largest = 2 ** (levels - 1)
    stretches, done = [], segments // largest * largest
    if done:
        stretches.append((levels - 1, 0, done))
    for level in reversed(range(levels - 1)):
        if segments - done >= 2**level:
            stretches.append((level, done, done + 2**level))
            done += 2**level
    return stretches


class Changes:
    """The difference of a memory to the one that documents start from, as a list of tensors; and the way back."""

    def __init__(self, memory) -> None:
        self.memory = memory
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


def run(mixer, model, weights: dict[str, Tensor], hidden: Tensor) -> Answer:
    """See the package's docstring; hidden [tokens, hidden_size]."""
    inner, own = mixer.memory, {name.removeprefix("memory."): w for name, w in weights.items()}
    memory = importlib.import_module(f"tests.contract.oracles.{inner.kind}").Memory(inner, model, own, hidden)
    made, state = recurrence.projections(inner, model, own, hidden)
    changes, groups = Changes(memory), model.heads // model.resolved_kv_heads
    decays = getattr(inner, "decay", False)
    now = [memory.begin(h) for h in range(model.resolved_kv_heads)]
    log_kept = [0.0] * model.resolved_kv_heads
    segments: list[list[tuple[list[Tensor], float]]] = [
        [] for _ in range(model.resolved_kv_heads)
    ]  # (changes, log of decays)
    keys, output, count = torch.zeros_like(made["key"]), [], mixer.levels + 1

    def stretch(h: int, first: int, last: int) -> tuple[list[Tensor], float]:
        """Return what segments first .. last-1 of head h have written, merged, and the logarithm of their decays."""
        total, logs = None, 0.0
        for change, log in segments[h][first:last]:
            before = total or [torch.zeros_like(c) for c in change]
            total = [c + math.exp(log) * b for c, b in zip(change, before, strict=True)]
            logs += log
        return total, logs

    for t in range(len(hidden)):
        for h in range(model.resolved_kv_heads):
            keys[t, h] = memory.prepare(made["key"][t, h], t)
            now[h] = memory.write(now[h], t, h, keys[t, h], made["value"][t, h])
            if decays:
                log_kept[h] += math.log(memory.gates[t, h]["decay"])
        reads = []
        for h in range(model.heads):
            g, query = h // groups, memory.ask(made["query"][t, h], t)

            def gate(level: int, h: int = h, t: int = t) -> float:
                projected = float(weights["level_gates.weight.weight"][h * count + level] @ hidden[t])
                return recurrence.softplus(float(weights["level_gates.factor"][h, level]) * projected)

            read = gate(0) * memory.read(now[g], query)
            for level, first, last in cut(len(segments[g]), mixer.levels):
                read = read + gate(level + 1) * memory.read(changes.undone(stretch(g, first, last)[0], g), query)
            reads.append(read)
        output.append(recurrence.finished(inner, model, own, hidden[t], reads))
        if (t + 1) % mixer.segment == 0:
            for h in range(model.resolved_kv_heads):
                segments[h].append((changes.of(now[h], h), log_kept[h]))
                now[h], log_kept[h] = memory.begin(h), 0.0
    names = list(memory.kept(memory.begin(0)))
    shapes = [tensor.shape for tensor in changes.of(memory.begin(0), 0)]
    levels = {
        name: torch.zeros(1, model.resolved_kv_heads, mixer.levels, *shape).double()
        for name, shape in zip(names, shapes, strict=True)
    }
    logs = torch.zeros(1, model.resolved_kv_heads, mixer.levels, dtype=torch.float64)
    for h in range(model.resolved_kv_heads):
        for level, first, last in cut(len(segments[h]), mixer.levels):
            found, logs[0, h, level] = stretch(h, first, last)
            for name, tensor in zip(names, found, strict=True):
                levels[name][0, h, level] = tensor
    return Answer(
        torch.stack(output),
        {
            **memory.state(now, keys, made["value"]),
            **state,
            **{f"level_{name}": tensor for name, tensor in levels.items()},
            "level_log_kept": logs,
            "log_kept": torch.tensor(log_kept, dtype=torch.float64)[None],
        },
    )
