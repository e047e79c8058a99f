"""How the attention to a long-term memory is spread over [0, 1] and over the words in it.

Martins, Marinho and Martins, "infinity-former: Infinite Memory Transformer", 2022, figures 4 and 5. The attention of a
query to a stretch of the memory is the mass of its normal density there. What lies outside of [0, 1] reads nothing.

Letters of shapes: T tokens, H heads, S stretches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megamem.evaluation.long_term_memory.cells import Float64
from megamem.evaluation.long_term_memory.reads import Read

BINS = 100
"""Intervals of the histogram."""


def attention_to(read: Read, borders: Float64) -> Float64:
    """Return each token's attention [T, S] to the stretches between ascending borders [S + 1], a mean over heads."""
    total = np.zeros((read.mean.shape[1], len(borders) - 1))
    # head by head: all at once would be H times as much memory
    for mean, deviation in zip(read.mean, read.deviation, strict=True):
        below = torch.special.ndtr(torch.from_numpy((borders - mean[:, None]) / deviation[:, None]))
        total += np.diff(below.numpy(), axis=1)
    return total / len(read.mean)


@dataclass(frozen=True)
class Histogram:
    """The attention to each region of one layer's memory, a mean over heads, tokens and documents."""

    density: Float64
    """[BINS] mean density in equal intervals of [0, 1]. Attention that is alike everywhere has the density 1."""
    outside: float
    """Share of the attention that lies outside of [0, 1]."""
    borders: tuple[float, ...]
    """Where the newest chunk in the memory begins, then the one before it and so on: means over what was read."""
    tokens: int
    """Tokens that have read the memory."""


def histogram(documents: Sequence[Sequence[Read]], chunk: int) -> Histogram:
    """Return the histogram of one layer.

    Args:
        documents: what was read in each of them; all count the same, however long.
        chunk: tokens that are added to the memory at once.
    """
    edges = np.linspace(0.0, 1.0, BINS + 1)
    mass = np.zeros(BINS)
    borders: dict[int, list[float]] = {}
    for reads in documents:
        masses = np.concatenate([attention_to(read, edges) for read in reads])
        mass += masses.mean(0) / len(documents)
        for read in reads:
            # the oldest chunk begins at 0, which is no border
            for age, token in enumerate(range(read.cells.end - chunk, read.cells.first, -chunk)):
                borders.setdefault(age, []).append(read.cells.border_before(token))
    return Histogram(
        density=mass * BINS,
        outside=float(1 - mass.sum()),
        borders=tuple(float(np.mean(borders[age])) for age in sorted(borders)),
        tokens=sum(read.mean.shape[1] for reads in documents for read in reads),
    )
