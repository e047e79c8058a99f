"""What a part of a model was seen to do with one chunk, and what that says of other shares of it.

Each operation's numbers and each storage's bytes are products of sizes: rows of the micro-batch are among them or not,
and so are heads of the rank. A measurement with few rows and many heads, and one with more rows and fewer heads, tell
which: what is larger the second time has rows among its sizes, as nothing else grew. With what is left of it, once the
rows are divided out, two shares of the heads make a line in 1 / TP, and so the numbers at any rows and TP are known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from megamem.config.training import Recompute
from megamem.planning.ledger import NEVER, Storages
from megamem.planning.operations import Operation
from megamem.planning.roofline import Work

Floats = npt.NDArray[np.float64]
Moments = npt.NDArray[np.int64]
Interpolate = Callable[[npt.NDArray[Any], npt.NDArray[Any]], Floats]
"""Takes numbers [N] of two measurements and returns those of another share."""


class PartWork(NamedTuple):
    """The operations of a part for one chunk of one micro-batch."""

    forward: Work
    backward: Work
    """Operations of the backward pass, those that recomputation repeats among them."""


class PartBytes(NamedTuple):
    """The bytes that a part of a stage (a layer, the embedding, the head) takes for one chunk of one micro-batch."""

    kept: float
    """Bytes from the chunk's forward to its backward: activations, the hidden chunk it hands on, new states."""
    forward: float
    """Most bytes while its forward runs, above those that there were before."""
    backward: float
    """Most bytes while its backward runs, above those that there were before; gradients of parameters are among the
    latter."""
    state_gradients: float
    """Bytes of gradients on the states that it read, from its backward to that of the chunk before."""


class SeenOperations(NamedTuple):
    """Operations as they were seen, with the bytes of each tensor that they read or wrote."""

    work: Work
    moved: Floats
    """Bytes [tensors] of one operation's tensors after the other's."""
    offsets: npt.NDArray[np.int64]
    """Where in `moved` the tensors of each operation begin, [operations]."""

    @classmethod
    def of(cls, operations: Sequence[Operation]) -> SeenOperations:
        """Return operations as numbers."""
        moved = [operation.moved for operation in operations]
        offsets = np.cumsum([0, *map(len, moved)])[:-1]
        sizes = np.array([size for each in moved for size in each], dtype=np.float64)
        return cls(Work.of(operations), sizes, offsets)

    def part(self, begin: int, end: int | None = None) -> SeenOperations:
        """Return the operations from one to before another, or to the last."""
        borders = np.append(self.offsets, len(self.moved))
        first, last = borders[begin], borders[-1 if end is None else end]
        return SeenOperations(self.work.part(begin, end), self.moved[first:last], self.offsets[begin:end] - first)

    def then(self, other: SeenOperations) -> SeenOperations:
        """Return these operations and others after them."""
        offsets = np.concatenate([self.offsets, other.offsets + len(self.moved)])
        return SeenOperations(self.work.then(other.work), np.concatenate([self.moved, other.moved]), offsets)


@dataclass(frozen=True)
class MeasuredChunk:
    """A part's operations and storages for one chunk.

    Moments of `storages`: one for each operation of the forward pass, one between the passes, and one for each
    operation of the backward pass.
    """

    storages: Storages
    seen_forward: SeenOperations
    seen_backward: SeenOperations
    state_gradients: float

    @property
    def work(self) -> PartWork:
        """What both passes ask of a device."""
        return PartWork(self.seen_forward.work, self.seen_backward.work)

    @property
    def kept(self) -> float:
        """See `PartBytes`."""
        return float(self._live[self._border])

    @property
    def forward(self) -> Floats:
        """Bytes after each operation of the forward pass, above those at its beginning."""
        return self._live[: self._border]

    @property
    def backward(self) -> Floats:
        """Bytes after each operation of the backward pass, above those at its beginning."""
        # where nothing learns there is no backward pass
        after = self._live[self._border + 1 :]
        return after - self.kept if len(after) else np.zeros(1)

    @property
    def bytes(self) -> PartBytes:
        """What is kept, and the most of each pass."""
        forward, backward = (float(each.max(initial=0.0)) for each in (self.forward, self.backward))
        return PartBytes(self.kept, forward, backward, self.state_gradients)

    @property
    def made_forward(self) -> int:
        """The number of storages that the forward pass made."""
        return int((self.storages.made <= self._border).sum())

    @property
    def _border(self) -> int:
        """The moment between the passes."""
        return len(self.seen_forward.offsets)

    @cached_property
    def _live(self) -> Floats:
        """Bytes at the end of each moment."""
        return self.storages.live(self._border + 1 + len(self.seen_backward.offsets))


Operations = TypeVar("Operations", Work, SeenOperations)
Pair = tuple[MeasuredChunk, MeasuredChunk]
"""Two measurements of one chunk."""


class Saved(NamedTuple):
    """What the backward pass of a layer, or of a part of it, needs of its forward pass."""

    operations: slice
    """Its operations, up to the last one whose operands or results are needed."""
    unneeded: int
    """Operations of the backward pass before the first tensor is asked for."""
    gone_before: list[int]
    """Places of what was gone in the moment of that, but before it."""
    until: dict[int, int]
    """The moment at whose end a storage is needed no more, by its place; others are not needed."""
    elsewhere: dict[int, int]
    """Likewise of what the rest of the layer needs."""
    given: list[int]
    """Places of what it is given, which stays where it is computed again."""


@dataclass(frozen=True)
class SeenChunk:
    """A chunk as it was measured, and what tells how it would be with recomputation."""

    plain: MeasuredChunk
    saved: Mapping[Recompute, Saved] = field(default_factory=dict)
    """What each way to compute again needs to know; nothing of embedding and head, which are measured as they are."""
    unsaved: Moments | None = None
    """See `Storages.gone`: where nothing is saved for a backward pass, as long as results of the forward pass live."""

    def under(self, recompute: Recompute) -> MeasuredChunk:
        """Return the chunk where so much is computed again."""
        if recompute is False or self.unsaved is None:
            return self.plain
        return recomputed(self.plain, self.saved[recompute], self.unsaved)

    def work_under(self, recompute: Recompute, work: PartWork) -> PartWork:
        """Return the chunk's operations likewise, from those of any share of it without recomputation."""
        if recompute is False or self.unsaved is None:
            return work
        return work._replace(backward=_with_forward_again(*work, self.saved[recompute]))


def recomputed(chunk: MeasuredChunk, saved: Saved, unsaved: Moments) -> MeasuredChunk:
    """Return the chunk with recomputation, put together from the chunk without it and what a forward pass then keeps.

    The backward pass runs until it asks for the first tensor. Then the forward pass is run again, up to the last tensor
    that is needed, and the backward pass goes on as it would without recomputation.

    saved: of what is computed again; unsaved: see `SeenChunk`.
    """
    plain, count, border = chunk.storages, chunk.made_forward, len(chunk.seen_forward.offsets)
    assert len(unsaved) == count, "a forward pass made other storages the second time"
    begin, end = saved.operations.start, saved.operations.stop
    # an operation that is run again comes so much later, and the backward pass behind it by so many operations
    resumes = border + 1 + saved.unneeded
    later, more = resumes - begin, end - begin

    def delayed(moments: Moments) -> Moments:
        """Return moments [N] of the backward pass without recomputation as they are with it."""
        return np.where((moments == NEVER) | (moments < resumes), moments, moments + more)

    # what is gone in the moment of the first use, but before it, is gone before anything is computed again
    gone_later = delayed(plain.gone)
    gone_later[saved.gone_before] = plain.gone[saved.gone_before]
    made, gone, sizes = plain.made[:count], plain.gone[:count], plain.sizes[:count]
    # the first time: what outlives the forward pass is gone when it is without recomputation, or stays with the layer
    first_gone = np.where(unsaved == NEVER, np.where(gone > border, gone_later[:count], NEVER), unsaved)
    # nor before the rest of the layer has used it, or what is computed again has been used
    needed = _by_place(saved.elsewhere, count)
    needed[saved.given] = np.maximum(needed[saved.given], max(saved.until.values(), default=0))
    first_gone = np.maximum(first_gone, np.where(needed > border, delayed(needed), 0))
    # the second time: what the backward pass does not need is gone when the forward pass has been run again
    until = _by_place(saved.until, count)
    again = (made >= begin) & (made < end)
    again_gone = np.where(until > border, delayed(until), later + np.minimum(gone, end))

    storages = Storages(
        np.concatenate([sizes, sizes[again], plain.sizes[count:]]),
        np.concatenate([made, later + made[again], delayed(plain.made[count:])]),
        np.concatenate([first_gone, again_gone[again], gone_later[count:]]),
    )
    backward = _with_forward_again(chunk.seen_forward, chunk.seen_backward, saved)
    return MeasuredChunk(storages, chunk.seen_forward, backward, chunk.state_gradients)


def _with_forward_again(forward: Operations, backward: Operations, saved: Saved) -> Operations:
    """Return the operations of a backward pass in which that whose needs are `saved` is computed again."""
    before, after = backward.part(0, saved.unneeded), backward.part(saved.unneeded)
    return before.then(forward.part(saved.operations.start, saved.operations.stop)).then(after)


def _by_place(moments: Mapping[int, int], count: int) -> Moments:
    """Return the moment of each of so many storages; 0 where there is none."""
    found = np.zeros(count, dtype=np.int64)
    found[list(moments)] = list(moments.values())
    return found


@dataclass(frozen=True)
class Lines:
    """Straight lines through two measurements, which give the numbers at any rows and TP size."""

    rows: tuple[int, int]
    tp_sizes: tuple[int, int]

    def at(self, first: npt.NDArray[Any], second: npt.NDArray[Any], rows: float, tp_size: int) -> Floats:
        """Return numbers [N] at so many rows and TP ranks, from what they were in both measurements."""
        near, far = self._weights(tp_size)
        per_row = near * first / self.rows[0] + far * second / self.rows[1]
        return np.maximum(0, np.where(second > first, rows * per_row, near * first + far * second))

    def _weights(self, tp_size: int) -> tuple[float, float]:
        """Return the weights of both in a line in 1 / TP."""
        here, there = self.tp_sizes
        if here == there:
            return 0.5, 0.5
        far = (1 / tp_size - 1 / here) / (1 / there - 1 / here)
        return 1 - far, far

    def bytes(self, measured: Pair, rows: float, tp_size: int) -> PartBytes:
        """Return the bytes of a chunk at so many rows and TP ranks."""
        (first, second), at = measured, partial(self.at, rows=rows, tp_size=tp_size)
        if np.array_equal(first.storages.made, second.storages.made):
            # which operation holds most may change with the size: each storage is sized before the most is looked for
            sizes = at(first.storages.sizes, second.storages.sizes)
            found = replace(first, storages=first.storages._replace(sizes=sizes)).bytes
        else:
            # choices made them do different things
            found = PartBytes(*map(float, at(np.array(first.bytes), np.array(second.bytes))))
        (state_gradients,) = at(np.array([first.state_gradients]), np.array([second.state_gradients]))
        return found._replace(state_gradients=float(state_gradients))

    def work(self, measured: Pair, rows: float, tp_size: int) -> PartWork:
        """Return the operations of a chunk at so many rows and TP ranks."""
        (first, second), at = measured, partial(self.at, rows=rows, tp_size=tp_size)
        forward = _work_at(at, first.seen_forward, second.seen_forward)
        return PartWork(forward, _work_at(at, first.seen_backward, second.seen_backward))


def _work_at(at: Interpolate, first: SeenOperations, second: SeenOperations) -> Work:
    """Return operations, one by one. Where choices made different ones, the second's stand for all, in proportion."""
    ours, theirs = first.work, second.work
    if np.array_equal(ours.kinds, theirs.kinds) and np.array_equal(first.offsets, second.offsets):
        numbers = {name: at(getattr(ours, name), getattr(theirs, name)) for name in Work._fields[1:]}
        count = np.diff(first.offsets, append=len(first.moved))
        moved = np.bincount(np.repeat(np.arange(len(count)), count), at(first.moved, second.moved), len(count))
        return Work(ours.kinds, **{**numbers, "moved": moved.astype(np.float64)})
    scale = {}
    for name in ("flops", "moved", "terms", "functions"):
        mine, other = float(getattr(ours, name).sum()), float(getattr(theirs, name).sum())
        scale[name] = float(at(np.array([mine]), np.array([other]))[0]) / max(1.0, other)
    # more products of the same size
    scale["products"] = scale["flops"]
    return theirs._replace(**{name: factor * getattr(theirs, name) for name, factor in scale.items()})
