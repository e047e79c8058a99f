"""Means of attention by distance.

Letters of shapes: T queries, K keys, B batch rows, H heads, D distances.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ByDistance:
    """What queries give to the key at each distance."""

    first: int
    """The distance of the first entry; the others follow one by one."""
    share: Float64
    """[D] mean over the pairs of a query and a key that it sees at this distance; NaN without any."""
    pairs: Int64
    """[D] how many pairs there are, each counted once for every head."""

    @property
    def distances(self) -> Int64:
        """The distances [D]."""
        return np.arange(self.first, self.first + len(self.share))


class DistanceSums:
    """Sums of shares by distance in float64, on the device where shares lie."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.first = 0
        self.sums: Tensor | None = None

    def add(self, shares: Tensor, unseen: Tensor, distances: Tensor) -> None:
        """Add a call.

        Args:
            shares: [B, H, T, K], 0 where a query does not see a key.
            unseen: bool [T, K] or [B, T, K], the same places in each call.
            distances: int64 [T, K], the same in each call.
        """
        if self.sums is None:
            self.first = int(distances.min())
            count = int(distances.max()) - self.first + 1
            self.sums = torch.zeros(2, count, dtype=torch.float64, device=shares.device)
        batch, heads, queries, keys = shares.shape
        seen = heads * (~unseen).expand(batch, queries, keys).sum(0)
        both = torch.stack((shares.double().sum((0, 1)), seen.double()))
        self.sums.index_add_(1, (distances - self.first).flatten(), both.flatten(1))

    def mean(self) -> ByDistance | None:
        """Return the means, from the first distance that was seen to the last one; None where nothing was added."""
        if self.sums is None:
            return None
        total, pairs = self.sums.cpu().numpy()
        seen = np.flatnonzero(pairs)
        kept = slice(seen[0], seen[-1] + 1)
        return _divided(self.first + int(seen[0]), total[kept], pairs[kept])


def pooled(parts: Sequence[ByDistance]) -> ByDistance:
    """Return the means over the pairs of all parts."""
    first = min(part.first for part in parts)
    total, pairs = np.zeros((2, max(part.first + len(part.share) for part in parts) - first))
    for part in parts:
        own = slice(part.first - first, part.first - first + len(part.share))
        total[own] += np.where(part.pairs > 0, part.share, 0.0) * part.pairs
        pairs[own] += part.pairs
    return _divided(first, total, pairs)


def _divided(first: int, total: Float64, pairs: Float64) -> ByDistance:
    """Return means from sums and numbers [D] of pairs."""
    share = np.divide(total, pairs, out=np.full_like(total, np.nan), where=pairs > 0)
    return ByDistance(first, share, pairs.astype(np.int64))
