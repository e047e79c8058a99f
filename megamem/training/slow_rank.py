"""The search for a rank that the others wait for, by how much of its time each rank waits inside collectives.

Ranks of one stage do the same work on the same number of tokens and meet in collectives, so whoever is slower than the
others waits less than they do. Stages are not compared with each other: they hold different layers, and those of a
pipeline wait for their neighbours by design.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

POLLS_PER_BEAT = 10
"""Times that a rank is looked at between two beats."""
SHARE_BEATS, LEAST_BEATS = 60, 30
"""Beats that a share is taken over, and the fewest beats of training it needs: 5 and 2.5 minutes at 5 s a beat."""
LEAST_LAG = 0.2
"""Share of their time that the others must lose to a rank for it to be called slow. Over LEAST_BEATS * POLLS_PER_BEAT
polls a share of one half has a standard deviation of 0.029, and a difference of two of 0.041: chance does not reach
it."""


@dataclass(frozen=True)
class SlowRank:
    """A rank that holds the others of its stage up."""

    rank: int
    wait_share: float
    """Share of its time that it waits for others."""
    others_wait_share: float
    """Median of that share over the others of its stage."""

    def __str__(self) -> str:
        return (
            f"is slower than the others of its stage: they wait {self.others_wait_share:.0%} of their time in "
            f"collectives, it waits {self.wait_share:.0%}"
        )


class WaitShares:
    """Shares of the last minutes of training that ranks waited, from counts that only grow."""

    def __init__(self) -> None:
        """Begin without any counts."""
        self._counts: dict[int, deque[tuple[int, int]]] = {}

    def add(self, rank: int, polls: int, polls_waiting: int) -> float | None:
        """Add a rank's counts, once a beat.

        Args:
            rank: the rank.
            polls: times that it was looked at while it trained, so far.
            polls_waiting: those of them that found it waiting.

        Returns:
            The share of polls over the last SHARE_BEATS beats that found it waiting; None while there are too few.
        """
        counts = self._counts.setdefault(rank, deque(maxlen=SHARE_BEATS + 1))
        counts.append((polls, polls_waiting))
        recent = polls - counts[0][0]
        return None if recent < LEAST_BEATS * POLLS_PER_BEAT else (polls_waiting - counts[0][1]) / recent


def slow_rank(shares: Mapping[int, float | None], stage_size: int) -> SlowRank | None:
    """Return the rank that costs the others of its stage most, or None where none costs them LEAST_LAG of their time.

    Args:
        shares: share of its time that each rank waits; None where it is not known.
        stage_size: ranks of each stage, TP x DP.
    """
    found = []
    for first in range(0, len(shares), stage_size):
        stage = {rank: share for rank in range(first, first + stage_size) if (share := shares[rank]) is not None}
        if len(stage) < 2:
            continue
        rank = min(stage, key=lambda rank: stage[rank])
        others = statistics.median(share for other, share in stage.items() if other != rank)
        # where all wait a lot, links are slow and no rank is: the slow one waits much less than the others
        if others - stage[rank] >= LEAST_LAG and stage[rank] <= others / 2:
            found.append(SlowRank(rank, stage[rank], others))
    return max(found, key=lambda slow: slow.others_wait_share - slow.wait_share, default=None)
