"""Log-linear attention over matrix memories whose levels fade, in products of many segments' tokens at once.

Guo et al., "Log-Linear Attention", 2025, section 3: all levels and the open memory obey the same linear recurrence, so
what a token reads of another's value is the recurrence's own coefficient times the gate of the level that the other is
in by then. With A, Q', K' and P as in `ops/linear_recurrence/unrolled.py`, S^(m) the open memory and the levels before
the tokens, and l(t, s) the place in which token t finds a source s, a token or such a memory:

    y_t = sum_{i <= t} g_t^(l(t, i)) A[t, i] v_i + sum_m g_t^(l(t, m)) S^(m)T q'_t
    S^(l) = P sum_{m in l} S^(m) + sum_{i in l} k'_i v_i^T         behind the tokens

Letters of shapes as in `log_linear.py`, and S sources, which are the open memory, the levels and the tokens.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megamem.config.model import ModelConfig
from megamem.memory.base import Chunk, State, to_device
from megamem.memory.composite.levels import Levels, Places, sources
from megamem.memory.composite.log_linear_settings import LogLinearSettings
from megamem.memory.composite.open_and_levels import OpenAndLevels
from megamem.memory.recurrent.base import Inputs
from megamem.memory.recurrent.matrix import MatrixConfig, MatrixMixer
from megamem.memory.shared.blocks import BlockSlice
from megamem.ops.deep_memory.kept import shared_product
from megamem.ops.deep_memory.kept_networks import kept_networks
from megamem.ops.deep_memory.pointwise import PLAIN
from megamem.ops.level_scan import Moves, level_scan
from megamem.ops.linear_recurrence.unrolled import passed
from megamem.parallel.linears import Linears


class _Like(NamedTuple):
    """What tensors of the levels are like."""

    device: torch.device
    dtype: torch.dtype


class PlacedSteps(NamedTuple):
    """Several steps of tokens among the open memory and the levels, whose places count as in `Levels.places`."""

    places: tuple[int, ...]
    """The M places that hold something before a step, or behind the last one."""
    held: tuple[int, ...]
    """Those that do before the first step."""
    read: Tensor
    """The place of each of these and of each token, as each token of a step sees it, [B, N, T, M + T] int64."""
    moves: Moves
    """Where places go at the end of each step."""
    tokens: Tensor | None
    """Which tokens of a step end up in each place that it writes into, [B, N, W, T]; None if all do, in one."""


class FadedMatrices(OpenAndLevels):
    """A matrix memory of the open segment, and levels that fade as it does."""

    def __init__(self, config: LogLinearSettings, model: ModelConfig, linears: Linears, layer: int) -> None:
        assert isinstance(config.recurrent, MatrixConfig)
        super().__init__(config, model, linears, layer, step=config.recurrent.inner_chunk)
        self.segment = config.segment
        self.pointwise = PLAIN

    def read(self, inputs: Inputs, gates: Tensor, state: State, block_slice: BlockSlice) -> tuple[Tensor, State]:
        """See `OpenAndLevels.read`."""
        assert isinstance(self.memory, MatrixMixer)
        where = (self.levels, self.segment, block_slice.starts, inputs.tokens)
        held, _, after = sources(*where)
        memories = 1 + self.levels.count
        # how much each source counts to each token, [B, H, G, T, S]
        places = _places_read(*where, gates.device)[:, None, None].expand(*gates.shape[:4], -1)
        shares = gates.gather(-1, places)
        unrolled, value = self.memory.unrolled(inputs), self.memory.written(inputs).to(gates.dtype)
        read = (shares[..., memories:] * unrolled.of_values) @ value[:, :, None]
        left: dict[int, Tensor] = {}
        if held:
            before = torch.stack([self._before(state, place) for place in held], dim=2)
            of_held = torch.stack([shares[..., place] for place in held], dim=-1)
            read = read + shared_product(unrolled.of_state, before, of_held)
            fading = unrolled.transition
            before = passed(None if fading is None else fading[:, :, None], before)
            left = dict(zip(held, before.unbind(2), strict=True))
        memory, *merged = [self._place(place, left, unrolled.writes, value, after) for place in range(memories)]
        return read, {**state, "memory": memory, "level_memory": torch.stack(merged, dim=2)}

    def whole_steps(self, chunk: Chunk, tokens: int) -> int:
        """See `OpenAndLevels.whole_steps`: all that there are, where rows stand at the beginning of a step."""
        count = tokens // self.step
        return count if count > 1 and all(start >= 0 and start % self.step == 0 for start in chunk.starts) else 0

    def read_steps(
        self, inputs: Inputs, gates: Tensor, state: State, starts: tuple[int, ...]
    ) -> tuple[Tensor, State]:  # fmt: skip
        """See `OpenAndLevels.read_steps`: only the levels go from step to step, all else is computed at once."""
        assert isinstance(self.memory, MatrixMixer)
        count = inputs.tokens // self.step
        where = placed_steps(self.levels, self.segment, starts, self.step, count, _Like(gates.device, gates.dtype))
        # each step as a head of its own, [B, H N, ...]
        steps = inputs.steps(count)
        unrolled, value = self.memory.unrolled(steps), self.memory.written(steps).to(gates.dtype)
        shares = gates.unflatten(3, (count, -1)).movedim(3, 2)
        shares = shares.gather(-1, where.read[:, None, :, None].expand(*shares.shape[:-1], -1)).flatten(1, 2)
        of_levels, of_tokens = shares.split((len(where.places), self.step), dim=-1)
        # what the tokens write into each level, [B, H, N, W, V, D]
        written, rows = ((x.unflatten(1, (-1, count))[:, :, :, None]) for x in (unrolled.writes, value))
        written = written if where.tokens is None else written * where.tokens[:, None, ..., None]
        passing = None if unrolled.transition is None else unrolled.transition.unflatten(1, (-1, count))
        # what holds nothing before the tokens is zero
        held = [self._before(state, place).mT * (place in where.held) for place in where.places]
        before, last = level_scan(passing, rows.mT @ written, torch.stack(held, dim=2), where.moves)
        read = (of_tokens * unrolled.of_values) @ value[:, :, None]
        read = read + kept_networks(unrolled.of_state, [before.flatten(1, 2)], of_levels, None, (), self.pointwise)
        left = dict(zip(where.places, last.mT.unbind(2), strict=True))
        nothing = torch.zeros_like(state["memory"])
        memory, *merged = [left.get(place, nothing) for place in range(1 + self.levels.count)]
        # a copy: as a view of `last` the open memory would keep all levels alive a second time
        state = {**state, "memory": memory.contiguous(), "level_memory": torch.stack(merged, dim=2)}
        return read.unflatten(1, (-1, count)).movedim(2, 3).flatten(3, 4), state

    def _before(self, state: State, place: int) -> Tensor:
        """Return what a place holds before the tokens: the open memory, or level `place` - 1, [B, H, D, V]."""
        memory: Tensor = state["level_memory"][:, :, place - 1] if place else state["memory"]
        return memory

    def _place(self, place: int, left: dict[int, Tensor], writes: Tensor, value: Tensor, after: Places) -> Tensor:
        """Return what a place holds behind the tokens, [B, H, D, V].

        Args:
            place: 0 for the open memory, 1 + l for level l.
            left: what is left of the open memory and the levels that held something before, by place, [B, H, D, V].
            writes, value: the key and the value that each token leaves, [B, H, T, D] and [B, H, T, V].
            after: `Sources.after`.
        """
        here = value.new_zeros(*value.shape[:2], writes.shape[-1], value.shape[-1])
        for source, memory in left.items():
            rows = after[:, source] == place
            if rows.all():
                here = here + memory
            elif rows.any():
                here = here + memory * to_device(rows, memory.device, memory.dtype)[:, None, None, None]
        tokens = after[:, 1 + self.levels.count :] == place
        if tokens.all():
            return here + writes.mT @ value
        if tokens.any():
            here = here + (writes * to_device(tokens, writes.device, writes.dtype)[:, None, :, None]).mT @ value
        return here


@lru_cache(maxsize=64)
def _places_read(
    levels: Levels, segment: int, starts: tuple[int, ...], tokens: int, device: torch.device
) -> Tensor:  # fmt: skip
    """Return `Sources.read` on a device, int64 [B, T, S]; cached, as all layers ask for the same."""
    with torch.inference_mode(False):
        return to_device(sources(levels, segment, starts, tokens).read, device)


@lru_cache(maxsize=16)
def placed_steps(
    levels: Levels, segment: int, starts: tuple[int, ...], step: int, count: int, like: _Like
) -> PlacedSteps:
    """Return where the sources of `count` steps of tokens lie, for rows that begin at positions `starts`.

    Cached, as all layers ask for the same. like: dtype and device of the levels.
    """
    every = [sources(levels, segment, tuple(start + n * step for start in starts), step) for n in range(count)]
    ends = sources(levels, segment, tuple(start + count * step for start in starts), step)
    memories = 1 + levels.count
    places = tuple(sorted({place for each in (*every, ends) for place in each.held}))
    read = np.stack([each.read[:, :, [*places, *range(memories, memories + step)]] for each in every], axis=1)
    # for each step the places that its tokens end up in, W of them: filled up with -1, in which no token does
    found = [sorted({int(place) for place in each.after[:, memories:].flat}) for each in every]
    written = [own + [-1] * (max(map(len, found)) - len(own)) for own in found]
    tokens = np.stack(
        [each.after[:, None, memories:] == np.array(own)[:, None] for each, own in zip(every, written, strict=True)],
        axis=1,
    )
    # [B, M, M]: 1 where the second place moves to the first; what holds nothing stays as it is
    goes = [np.where(np.isin(places, each.held), each.after[:, places], places) for each in every]
    moves = [(own[:, None] == np.array(places)[:, None]).astype(np.int64) for own in goes]
    stays = np.eye(len(places), dtype=np.int64)
    with torch.inference_mode(False):
        matrices = [None if (own == stays).all() else to_device(own, *like)[:, None] for own in moves]
        into = [[places.index(place) if place >= 0 else 0 for place in own] for own in written]
        whole = None if tokens.all() else to_device(tokens, *like)
        return PlacedSteps(places, tuple(every[0].held), to_device(read, like.device), Moves(matrices, into), whole)
