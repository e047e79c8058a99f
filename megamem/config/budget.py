"""The number of optimizer steps that a budget of tokens takes."""

from __future__ import annotations

import math
from fractions import Fraction

NONE, HALF = Fraction(0), Fraction(1, 2)
"""Shares of padding: without any, and the largest that a run takes unless `data.allow_padding` says so."""


def steps_for(tokens: int | Fraction, positions: int, padding: Fraction = NONE) -> int:
    """Return the optimizer steps that are expected to train on `tokens` tokens, rounded up.

    Args:
        tokens: the budget; padding does not count.
        positions: positions of a step over all ranks, padding included.
        padding: expected share of padding among them, below 1. A fraction, so that every process finds the same number.
    """
    return math.ceil(tokens / (positions * (1 - padding)))
