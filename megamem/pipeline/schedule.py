"""Schedules as data: which unit (micro-batch, chunk) each stage runs forward or backward, and when. No torch here.

The unit of work is a chunk of a micro-batch. A window is the run of `bptt_chunks` chunks that gradients through memory
cross; its chunks run backward last to first. Every stage runs all forwards in one order and all backwards in one
order, so that what crosses a border between stages arrives in the order in which it is wanted.

Where memory stays in the layers, the chunks of one micro-batch follow each other. Where a memory leaves the last stage
and enters the first one before the next chunk (`interleaved`), a micro-batch's next chunk has to wait until its last
one has been through all stages; meanwhile the stages work on other micro-batches:

    in a row      forwards  m0c0 m0c1 m0c2 .. m1c0 m1c1 ..
    interleaved   forwards  m0c0 m1c0 m2c0 .. m0c1 m1c1 ..   (groups of at least as many micro-batches as stages)

A schedule over whole sequences (1F1B as in Narayanan et al. 2019) is the same with one chunk per micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Action:
    """One stage's work on one unit."""

    kind: Literal["forward", "backward"]
    micro_batch: int
    """Index of the micro-batch in the step."""
    chunk: int
    """Index of the chunk in its sequences."""

    def __str__(self) -> str:
        """Return the action in words, as error messages and the watchdog show it."""
        return f"{self.kind} of micro-batch {self.micro_batch}, chunk {self.chunk}"


Order = list[Action]
"""What one stage does, first to last."""


def check_window(chunks: int, bptt_chunks: int) -> None:
    """Raise ValueError unless bptt_chunks divides chunks."""
    if chunks % bptt_chunks:
        raise ValueError(f"bptt_chunks {bptt_chunks} does not divide {chunks} chunks")


def groups_of(micro_batches: int, stages: int, interleaved: bool) -> list[range]:
    """Return the micro-batches whose chunks take turns, group by group, larger groups first.

    In a row each is a group of its own. Interleaved, groups are as small as keeps all stages busy: at least `stages`
    micro-batches each, or all there are.
    """
    if not interleaved:
        return [range(m, m + 1) for m in range(micro_batches)]
    count = max(micro_batches // stages, 1)
    size, larger = divmod(micro_batches, count)
    begins = [group * size + min(group, larger) for group in range(count + 1)]
    return [range(begin, end) for begin, end in zip(begins[:-1], begins[1:], strict=True)]


def forward_order(groups: list[range], chunks: int) -> Order:
    """Return the forwards of every stage, in order; by itself the schedule of an evaluation."""
    return [Action("forward", m, c) for group in groups for c in range(chunks) for m in group]


def backward_order(groups: list[range], chunks: int, bptt_chunks: int) -> Order:
    """Return the backwards of every stage: groups and windows in order, a window from its last chunk to its first."""
    check_window(chunks, bptt_chunks)
    return [
        Action("backward", m, c)
        for group in groups
        for first in range(0, chunks, bptt_chunks)
        for c in reversed(range(first, first + bptt_chunks))
        for m in group
    ]


def warmup_units(stage: int, stages: int, groups: list[range], bptt_chunks: int, interleaved: bool) -> int:
    """Return the number of forwards that `stage` runs before its first backward.

    The first backward is that of the first micro-batch's last chunk in its window: the stage above needs that many
    forwards less one (none above the last), and the window's earlier chunks come before it for the whole group.
    """
    group = len(groups[0])
    ahead = stages - 1 - stage
    if interleaved and bptt_chunks > 1:
        # the first stage needs the memory of a chunk that the last one reads after backwards for which it waits for the
        # first one's: with few micro-batches, stages that ran further ahead would wait for each other for ever
        ahead = min(ahead, 2 * group)
    return ahead + (bptt_chunks - 1) * group


def stage_order(
    stage: int, stages: int, micro_batches: int, chunks: int, bptt_chunks: int, interleaved: bool = False
) -> Order:
    """Return what `stage` of `stages` does in one optimizer step.

    Forwards until the first window's last chunk can be back, then one forward, one backward in turn, then the
    backwards that are left. Raises ValueError unless bptt_chunks divides chunks.
    """
    groups = groups_of(micro_batches, stages, interleaved)
    forwards = forward_order(groups, chunks)
    backwards = backward_order(groups, chunks, bptt_chunks)
    warmup = min(warmup_units(stage, stages, groups, bptt_chunks, interleaved), len(forwards))
    order = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(forwards) - warmup :]


def chunk_schedule(
    stages: int, micro_batches: int, chunks: int, bptt_chunks: int, interleaved: bool = False
) -> list[Order]:
    """Return the orders of all stages."""
    return [stage_order(s, stages, micro_batches, chunks, bptt_chunks, interleaved) for s in range(stages)]


def bubble(stages: int, micro_batches: int, chunks: int) -> float:
    """Idle time of a stage over its working time where all units cost the same: (P - 1) / (M C).

    Interleaved schedules have the same bubble as long as there are as many micro-batches as stages; with fewer,
    stages wait for each other in every chunk, and the simulator says how long.
    """
    return (stages - 1) / (micro_batches * chunks)


def peak_units(
    stage: int, stages: int, micro_batches: int, chunks: int, bptt_chunks: int, interleaved: bool = False
) -> int:
    """Most units whose activations `stage` holds at once: min(P - p + (K - 1) G, M C), G micro-batches taking turns.

    Interleaved with fewer micro-batches than stages it may be fewer; see `warmup_units`.
    """
    groups = groups_of(micro_batches, stages, interleaved)
    return min(warmup_units(stage, stages, groups, bptt_chunks, interleaved) + 1, micro_batches * chunks)


@dataclass(frozen=True)
class WindowPass:
    """Run chunks first..last of one micro-batch forward, then backward as one."""

    micro_batch: int
    """Index of the micro-batch in the step."""
    first: int
    """First chunk."""
    last: int
    """Last chunk, inclusive."""

    @property
    def begins(self) -> bool:
        """Whether the sequences begin here: the state comes from outside, not from the window before."""
        return self.first == 0

    @property
    def chunks(self) -> range:
        """The chunks in order."""
        return range(self.first, self.last + 1)


def window_schedule(micro_batches: int, chunks: int, bptt_chunks: int) -> Iterator[WindowPass]:
    """Return the order of a rank that holds the whole model: micro-batches, their windows in order, each as a whole.

    Raises ValueError unless bptt_chunks divides chunks.
    """
    check_window(chunks, bptt_chunks)
    for micro_batch in range(micro_batches):
        for first in range(0, chunks, bptt_chunks):
            yield WindowPass(micro_batch, first, first + bptt_chunks - 1)
