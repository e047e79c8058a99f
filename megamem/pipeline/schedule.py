"""Schedules as data: which unit (sequence, chunk) each stage runs forward or backward, and when. No torch here.

The unit of work is a chunk of a sequence. A window is the run of `bptt_chunks` chunks that gradients through memory
cross; its chunks run backward last to first. Every stage runs all forwards in one order (chunks of a sequence, then
the next sequence) and all backwards in one order (windows in order), so that what crosses a border between stages
arrives in the order in which it is wanted.

A schedule over whole sequences (1F1B as in Narayanan et al. 2019) is the same with one chunk per sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Action:
    """One stage's work on one unit."""

    kind: Literal["forward", "backward"]
    sequence: int
    """Index of the micro-batch."""
    chunk: int

    def __str__(self) -> str:
        """In words, as error messages and the watchdog show it."""
        return f"{self.kind} of micro-batch {self.sequence}, chunk {self.chunk}"


Order = list[Action]
"""What one stage does, first to last."""


def check_window(chunks: int, bptt_chunks: int) -> None:
    """Raise ValueError unless bptt_chunks divides chunks."""
    if chunks % bptt_chunks:
        raise ValueError(f"bptt_chunks {bptt_chunks} does not divide {chunks} chunks")


def forward_order(sequences: int, chunks: int) -> Order:
    """Forwards of every stage, in order; by itself the schedule of an evaluation."""
    return [Action("forward", s, c) for s in range(sequences) for c in range(chunks)]


def backward_order(sequences: int, chunks: int, bptt_chunks: int) -> Order:
    """Backwards of every stage, in order: windows in order, inside a window from the last chunk to the first."""
    check_window(chunks, bptt_chunks)
    return [
        Action("backward", s, c)
        for s in range(sequences)
        for first in range(0, chunks, bptt_chunks)
        for c in reversed(range(first, first + bptt_chunks))
    ]


def stage_order(stage: int, stages: int, sequences: int, chunks: int, bptt_chunks: int) -> Order:
    """What `stage` of `stages` does in one optimizer step.

    Forwards until the first window's last chunk can be back (stages - 1 - stage + bptt_chunks - 1 of them), then one
    forward, one backward in turn, then the backwards that are left. Raises ValueError unless bptt_chunks divides
    chunks.
    """
    forwards = forward_order(sequences, chunks)
    backwards = backward_order(sequences, chunks, bptt_chunks)
    warmup = min(stages - 1 - stage + bptt_chunks - 1, len(forwards))
    order = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(forwards) - warmup :]


def chunk_schedule(stages: int, sequences: int, chunks: int, bptt_chunks: int) -> list[Order]:
    """The orders of all stages."""
    return [stage_order(stage, stages, sequences, chunks, bptt_chunks) for stage in range(stages)]


def bubble(stages: int, sequences: int, chunks: int) -> float:
    """Idle time of a stage over its working time where all units cost the same: (P - 1) / (M C)."""
    return (stages - 1) / (sequences * chunks)


def peak_units(stage: int, stages: int, sequences: int, chunks: int, bptt_chunks: int) -> int:
    """Most units whose activations `stage` holds at once: min(P - p + K - 1, M C)."""
    return min(stages - stage + bptt_chunks - 1, sequences * chunks)


@dataclass(frozen=True)
class WindowPass:
    """Run chunks first..last of one sequence forward, then backward as one."""

    sequence: int
    """Index of the micro-batch."""
    first: int
    """First chunk."""
    last: int
    """Last chunk, inclusive."""

    @property
    def begins(self) -> bool:
        """Whether the sequence begins here: the state comes from outside, not from the window before."""
        return self.first == 0

    @property
    def chunks(self) -> range:
        """The chunks in order."""
        return range(self.first, self.last + 1)


def window_schedule(sequences: int, chunks: int, bptt_chunks: int) -> Iterator[WindowPass]:
    """The order where one rank holds the whole model and runs each window as a whole: sequences, windows in order.

    Raises ValueError unless bptt_chunks divides chunks.
    """
    check_window(chunks, bptt_chunks)
    for sequence in range(sequences):
        for first in range(0, chunks, bptt_chunks):
            yield WindowPass(sequence, first, first + bptt_chunks - 1)
