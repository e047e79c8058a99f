"""Where past tokens lie in a continuous long-term memory, and how much of it each of them occupies.

Martins, Marinho and Martins, "infinity-former: Infinite Memory Transformer", 2022, section 3.3 and footnote 6.
A chunk's vectors are fitted at places in [0, 1]; each occupies its **cell**, the places nearer to it than to any other.
An update reads the old signal at M places, puts what it read at M new places in [0, tau] and the new vectors into
]tau, 1]. What becomes of the old cells follows from three statements:

    every place at which the signal may be read stands for the stretch of places nearest to it   (its Voronoi cell)
    a stretch that was read k times is held by the k new cells of what was read there, in order
    inside them its tokens keep their order and their proportions

So the border of an old cell moves by a map that is linear on each stretch. At equal distances it is p -> tau p. For
sticky memories a stretch may be the bin of a histogram: read often, its tokens occupy more; never read, nothing.

Letters of shapes: P tokens in the memory, K places at which the old signal may be read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megamem.memory.continuous.gaussian_basis import Regression
from megamem.memory.continuous.long_term_memory import Places

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Cells:
    """The stretches of [0, 1] that the tokens in a memory occupy, in the order of the text."""

    first: int
    """Number in its document of the token that the first cell belongs to; the others follow one by one."""
    borders: Float64
    """[P + 1], ascending from 0 to 1. Where two are equal, nothing of a token is left."""

    @property
    def end(self) -> int:
        """Number in its document of the token after the last one in the memory."""
        return self.first + len(self.borders) - 1

    def border_before(self, token: int) -> float:
        """Return where the cell of a token begins, or where that of the token before it ends."""
        return float(self.borders[token - self.first])


@dataclass(frozen=True)
class Samples:
    """Where an update has read the old signal."""

    possible: Float64
    """[K] places at which it might have been read, ascending."""
    counts: Int64
    """[K], how often it was read at each of them."""


def voronoi(places: Float64) -> Float64:
    """Return the borders [n + 1] of the cells of ascending places [n] in [0, 1]."""
    return np.concatenate(([0.0], (places[1:] + places[:-1]) / 2, [1.0]))


def equal_samples(regression: Regression) -> Samples:
    """Return the samples of an update that reads the old signal at equal distances."""
    possible = np.arange(1, regression.samples + 1) / regression.samples
    return Samples(possible, np.ones(regression.samples, dtype=np.int64))


def sticky_samples(places: Places, samples: Float64) -> Samples:
    """Return the samples of an update that reads the old signal at `samples` [M], each a place in one of the bins."""
    possible = (np.arange(places.bins) + places.at) / places.bins
    bins = np.rint(samples * places.bins - places.at).astype(np.int64)
    return Samples(possible, np.bincount(bins, minlength=places.bins))


def first_cells(regression: Regression, first: int) -> Cells:
    """Return the cells of the chunk with which a memory begins; `first` is the number of its first token."""
    return Cells(first, voronoi(regression.first_places()[0].numpy()))


def later_cells(regression: Regression, old: Cells, samples: Samples) -> Cells:
    """Return the cells after the chunk that follows those in `old` has been added."""
    kept, new, _ = regression.later_places()
    borders = voronoi(np.concatenate((kept.numpy(), new.numpy())))
    # the samples' own cells lie from 0 to the middle between the last of them and the first new vector
    ends = borders[: regression.samples + 1]
    stretches = voronoi(samples.possible)
    read_before = np.concatenate(([0], np.cumsum(samples.counts)))
    moved = np.interp(old.borders, stretches, ends[read_before])
    return Cells(old.first, np.concatenate((moved, borders[regression.samples + 1 :])))
