"""Levels of log-linear attention: which segments each of them holds, and how much each counts.

Guo et al., "Log-Linear Attention", 2025: the past is cut into stretches that double in length with their distance. With
blocks of 2^j segments, j = 0, 1, 2 ..., a segment i that has ended before the open segment n is in level

    weak:   the last l for which the blocks of 2^l segments that hold i and n are two          (Fenwick tree)
    strong: the first l for which the blocks of 2^l segments that hold i and n are one, or neighbors

These are the admissibility conditions of hierarchical matrices (Hackbusch and others): with the weak one a long stretch
may lie directly before the open segment, with the strong one a stretch is never longer than what lies between, so the
newest past is told apart most finely at any time. In bits of n: with the weak one level l holds 2^l segments where
bit l is 1; with the strong one level 0 holds one, and level l the 2^(l - 1) before the others, twice as many where
bit l - 1 is 1, up to the level of the leading bit. The last level takes in all that is older.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megamem.config.model import ModelConfig
from megamem.memory.base import State, to_device
from megamem.parallel.linears import Linears, constant, declare, normal

Admissibility = Literal["weak", "strong"]
Places = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Levels:
    """A number of levels, and what tells them apart."""

    count: int
    """Number of levels."""
    admissibility: Admissibility
    """The condition that a level's segments keep."""

    @property
    def last(self) -> int:
        """Number of the last level."""
        return self.count - 1

    def of(self, segments: Places, segment: Places) -> Places:
        """Return the level of each `segment`, counted from 0, after so many `segments` have ended; shapes broadcast."""
        first, apart = (0, 1) if self.admissibility == "strong" else (1, 0)
        shifts = range(first, first + self.last)
        beyond = (((segments >> j) - (segment >> j) > apart).astype(np.int64) for j in shifts)
        return sum(beyond, start=np.zeros(np.broadcast(segments, segment).shape, dtype=np.int64))

    def holding(self, segments: int) -> list[int]:
        """Return the levels that hold something after so many segments, ascending."""
        if self.admissibility == "strong":
            return list(range(min(segments.bit_length(), self.count)))
        return [
            level
            for level in range(self.count)
            if (segments >> level) & 1 or (level == self.last and segments >> level)
        ]

    def newest(self, segments: int, level: int) -> int:
        """Return the newest segment of a level that holds something after so many segments."""
        if self.admissibility == "weak":
            return (segments >> level << level) - 1
        return ((segments >> level - 1) - 1 << level - 1) - 1 if level else segments - 1

    def target(self, segments: int) -> int:
        """Return the level at which the next segment's carry ends: those below hand on what they hold."""
        ones = (~segments & (segments + 1)).bit_length() - 1
        return min(ones, self.last) if self.admissibility == "weak" else min(ones + 1, segments.bit_length(), self.last)

    def places(self, segments: Places, segment: Places) -> Places:
        """Return 0 for each `segment` that is open after so many `segments` have ended, 1 + its level for earlier ones.

        The segment is at most the open one, whose number is `segments`; shapes broadcast.
        """
        return np.where(segment >= segments, 0, 1 + self.of(segments, segment))


class Sources(NamedTuple):
    """What the tokens of a call read: the open segment, the levels, and the tokens themselves, in this order."""

    held: list[int]
    """Those of open segment and levels, counted as places are, that hold something in some row before the tokens."""
    read: Places
    """The place (`Levels.places`) of each source as each token sees it, [rows, tokens, 1 + levels + tokens]."""
    after: Places
    """The place of each source behind the tokens, [rows, 1 + levels + tokens]."""


@lru_cache(maxsize=64)
def sources(levels: Levels, segment: int, starts: tuple[int, ...], tokens: int) -> Sources:
    """Return the sources of `tokens` tokens of rows that begin at positions `starts`, in segments of so many tokens.

    Cached, as all layers ask for the same. Padding counts as if its document began there.
    """
    begins = [max(start, 0) for start in starts]
    positions = np.array(begins)[:, None] + np.arange(tokens)
    number = positions // segment
    open_ones = [begin // segment for begin in begins]
    older = [[n, *(max(levels.newest(n, level), 0) for level in range(levels.count))] for n in open_ones]
    every = np.concatenate((np.array(older), number), axis=1)
    held = {1 + level for n in open_ones for level in levels.holding(n)}
    if any(begin % segment for begin in begins):
        held.add(0)
    ends = (positions[:, -1:] + 1) // segment
    return Sources(sorted(held), levels.places(number[:, :, None], every[:, None]), levels.places(ends, every))


class LevelGates(nn.Module):
    """The gates softplus(c_l w_l . x) of each token, head and level, that of the open segment first."""

    def __init__(self, model: ModelConfig, linears: Linears, count: int) -> None:
        super().__init__()
        self.weight = linears.column(model.hidden_size, model.heads * count, normal(model.init_std))
        local = model.heads // linears.tp_size
        self.factor = declare(nn.Parameter(torch.empty(local, count)), constant(1.0), shard_axis=0)

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Map x [T, B, hidden_size] to gates [B, local heads, T, 1 + levels] in `dtype`."""
        projected = self.weight(x).to(dtype).unflatten(-1, self.factor.shape)
        return F.softplus(self.factor.to(dtype) * projected).permute(1, 2, 0, 3)


def select_rows(rows: list[bool], yes: State, no: State, device: torch.device) -> State:
    """Return a state that is `yes` in the rows that are true, and `no` in the others."""
    if all(rows):
        return yes
    if not any(rows):
        return no
    mask = to_device(rows, device, torch.bool)
    return {name: torch.where(mask.view(-1, *[1] * (x.ndim - 1)), x, no[name]) for name, x in yes.items()}
