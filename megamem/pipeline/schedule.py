"""Schedules as data: the order in which units (sequence, chunk) run forward and windows of them run backward.

No torch here. The unit of work is a chunk of a sequence; a window is the run of chunks that one backward pass spans.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


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
    """The order on one stage: sequences in order, windows in order.

    Raises ValueError unless bptt_chunks divides chunks.
    """
    if chunks % bptt_chunks:
        raise ValueError(f"bptt_chunks {bptt_chunks} does not divide {chunks} chunks")
    for sequence in range(sequences):
        for first in range(0, chunks, bptt_chunks):
            yield WindowPass(sequence, first, first + bptt_chunks - 1)
