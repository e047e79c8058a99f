"""The rank that the others wait for: found from how much of its time each rank waits inside collectives.

Ranks of one stage do the same work on the same number of tokens and meet in collectives, so whoever is slower than the
others waits less than they do. Stages are not compared with each other: they hold different layers, and those of a
pipeline wait for their neighbours by design.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

SAMPLES = 10
"""Looks at a rank between two beats."""
WINDOW, LEAST = 60, 30
"""Beats that a share is taken over, and the training it needs to say anything: 5 and 2.5 minutes at 5 s a beat."""
LAG = 0.2
"""Share of their time that the others must lose to a rank for it to be called slow. Over LEAST * SAMPLES looks a share
of one half has a standard deviation of 0.029, and a difference of two of 0.041: chance does not reach it."""


@dataclass(frozen=True)
class SlowRank:
    """A rank that holds the others of its stage up."""

    rank: int
    waits: float
    """Share of its time that it waits for others."""
    others_wait: float
    """The median of the others of its stage."""

    def __str__(self) -> str:
        return (
            f"is slower than the others of its stage: they wait {self.others_wait:.0%} of their time in collectives, "
            f"it waits {self.waits:.0%}"
        )


class WaitShares:
    """Shares of the last minutes of training that ranks waited, from counts that only grow."""

    def __init__(self) -> None:
        self._counts: dict[int, deque[tuple[int, int]]] = {}

    def note(self, rank: int, samples: int, waited: int) -> float | None:
        """Take in a rank's counts, once a beat: looks at it while it trained, and those that found it waiting.

        Returns: the share of looks that did over the last WINDOW beats; None while there are too few.
        """
        counts = self._counts.setdefault(rank, deque(maxlen=WINDOW + 1))
        counts.append((samples, waited))
        seen = samples - counts[0][0]
        return None if seen < LEAST * SAMPLES else (waited - counts[0][1]) / seen


def slow_rank(shares: Mapping[int, float | None], stage_size: int) -> SlowRank | None:
    """The rank that costs the others of its stage most, or None where no rank costs them LAG of their time.

    Args:
        shares: of time that each rank waits; None where it is not known.
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
        if others - stage[rank] >= LAG and stage[rank] <= others / 2:
            found.append(SlowRank(rank, stage[rank], others))
    return max(found, key=lambda slow: slow.others_wait - slow.waits, default=None)
