"""Kept segments of logarithmic length: the binary digits of the number of segments read, merged as a counter carries.

After n segments level l holds 2^l of them, as one, if bit l of n is 1; the highest levels hold the oldest. A segment
that ends takes level 0. If that is taken, the two become one that takes level 1, and so on: a carry. With a and b two
neighbours of one length, a the earlier one,

    write: continued      M_ab = M_b, whose memory has gone on from a's end
    write: independent    M_ab = M_b + kept_b (M_a - M_0), kept_b the product of the decays of b's tokens

The second is what reading both in one go gives a linear memory; for a deep one the gradients of b were taken at M_0 and
what b's tokens wrote, not at M_a. Keys of both are pooled together. The last level takes in all that is older.

Letters of shapes: B batch rows, H local key/value heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megamem.config.model import ModelConfig
from megamem.memory.base import State, to_device
from megamem.memory.composite.levels import select_rows
from megamem.memory.composite.memory_caching_settings import MemoryCachingSettings
from megamem.memory.composite.segments import Ended, KeptSegments, Segments, SegmentSlice, pool
from megamem.memory.recurrent.base import RecurrentMixer


class LogarithmicSegments(KeptSegments):
    """Keeps segments merged by level, and says which of them a token may read."""

    def __init__(self, config: MemoryCachingSettings, model: ModelConfig, memory: RecurrentMixer) -> None:
        self.config = config
        self.levels = config.placed
        self.memory = memory
        self.matrices = list(config.recurrent.snapshot_shapes(model))
        self.names = list(config.level_specs(model))

    def room(self, state: State, segments: int) -> int:
        """See `KeptSegments.room`: all."""
        return segments

    def readable(self, state: State, block_slice: SegmentSlice) -> list[Segments]:
        """See `KeptSegments.readable`: the levels that hold something in some row."""
        counts, device = self._ended(block_slice), state["key_sum"].device
        occupied = [self.levels.holding(count) for count in counts]
        parts = []
        for level in sorted({level for row in occupied for level in row}, reverse=True):
            held = self._held(state, level)
            visible = [[level in row] for row in occupied]
            ages = [[row.index(level) + 1 if level in row else 0] for row in occupied]
            # rows that hold nothing here divide zeros
            tokens = [[max(self.config.merged_segments(count, level), 1) * self.config.segment] for count in counts]
            weights = tuple(held[name][:, :, None] for name in self.matrices)
            pools = pool(held["key_sum"][:, :, None], tokens, self.config.pooling)
            of_rows = to_device(visible, device, torch.bool)[:, None], to_device(ages, device)[:, None]
            parts.append(Segments(weights, pools, *of_rows))
        return parts

    def one_by_one(
        self, state: State, ended: Ended, slices: Sequence[SegmentSlice], parameters: Mapping[str, Tensor]
    ) -> tuple[list[list[Segments]], State]:
        """See `KeptSegments.one_by_one` (N segments, [B, H, N, ...]): each asks by itself, as levels merge."""
        readable = []
        for i, here in enumerate(slices):
            readable.append(self.readable(state, here))
            state = self.close(state, ended.one(i), here, parameters)
        return readable, state

    def close(self, state: State, ended: Ended, block_slice: SegmentSlice, parameters: Mapping[str, Tensor]) -> State:
        """See `KeptSegments.close`: the segment [B, H, ...] is carried into the levels.

        It takes in what each level below its target holds and leaves that level empty; at its target it stays.
        """
        counts, last, device = self._ended(block_slice), self.levels.last, ended.key_sum.device
        # target: -1 for rows whose segment goes on
        target = [
            self.levels.target(count) if closing else -1
            for count, closing in zip(counts, block_slice.closing, strict=True)
        ]
        values = [*ended.matrices, ended.key_sum, *(() if ended.log_kept is None else (ended.log_kept,))]
        # copies: views of what several segments share would keep all of it alive
        carried = {name: value.clone() for name, value in zip(self.names, values, strict=True)}
        new = dict(state)
        for level in range(max(target) + 1):
            held = self._held(state, level)
            here, passing = [t == level for t in target], [t > level for t in target]
            # only the last level is a target that may hold something
            joins = [t == last == level and count >> last > 0 for t, count in zip(target, counts, strict=True)]
            merging = [p or j for p, j in zip(passing, joins, strict=True)]
            if any(merging):
                carried = select_rows(merging, self._merged(held, carried, state, parameters), carried, device)
            left = select_rows(passing, {name: torch.zeros_like(x) for name, x in held.items()}, held, device)
            kept = select_rows(here, carried, left, device)
            new |= {f"level_{level}_{name}": tensor for name, tensor in kept.items()}
        return new

    def _ended(self, block_slice: SegmentSlice) -> list[int]:
        """Return the number of segments before the open one, for each row."""
        return [max(start, 0) // self.config.segment for start in block_slice.starts]

    def _held(self, state: State, level: int) -> dict[str, Tensor]:
        """Return what a level holds, [B, H, ...]."""
        return {name: state[f"level_{level}_{name}"] for name in self.names}

    def _merged(
        self, earlier: dict[str, Tensor], later: dict[str, Tensor], state: State, parameters: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return two neighbouring segments as one, [B, H, ...] each. state, parameters: what a memory starts from."""
        merged = {**later, "key_sum": earlier["key_sum"] + later["key_sum"]}
        if self.config.write == "continued":
            return merged
        kept = None
        if self.config.fades:
            merged["log_kept"] = earlier["log_kept"] + later["log_kept"]
            kept = later["log_kept"].exp()[..., None, None]
        start = self.memory.snapshot({n: torch.zeros_like(state[n][:1]) for n in self.memory.renewed()}, parameters)
        for name, first in zip(self.matrices, start, strict=True):
            change = earlier[name] - first
            merged[name] = later[name] + (change if kept is None else kept * change)
        return merged
