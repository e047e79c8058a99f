"""The HiPPO matrices of every position: built on first use, kept in memory within a bound, large ones on disk.

Matrices are kept by what they depend on, so that layers, block sizes and sampling strategies share them: P by the
ratio of its two positions, K by both, R by its sampling points as fractions of the history. Letters of shapes: B batch
rows, N order, L tokens of a block, S samples, C channels.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

from megamem.errors import ConfigError
from megamem.memory.continuous.hippo import Sampling, kernel, reconstruction, sample_points, transition
from megamem.memory.continuous.hippo_rules import stepped
from megamem.memory.continuous.matrix_cache import cached

Discretization = Literal["zoh", "forward", "backward", "bilinear"]
ON_DISK = {True: 1024, False: 64}
"""Orders from which on building takes longer than reading a file, of closed forms (True) and approximate rules."""
BLOCKS_ON_DISK = 64
"""Number of first blocks of a document whose matrices have files."""
BAND = 512
"""Rows of a band of a triangular matrix, about; there are at most 8 bands. A product skips what lies above a band."""


@dataclass(frozen=True)
class LowerTriangular:
    """A lower triangular matrix [1 or B, N, N] as bands of rows without the zeros to their right."""

    bands: tuple[Tensor, ...]
    """Rows lo .. hi of columns 0 .. hi for each band, [1 or B, hi - lo, hi]."""

    def __matmul__(self, x: Tensor) -> Tensor:
        """Return the product with x [B, N, C], at little more than half the work where there are many bands."""
        if len(self.bands) == 1:
            return self.bands[0] @ x
        return torch.cat([band @ x[..., : band.shape[-1], :] for band in self.bands], dim=-2)

    def dense(self) -> Tensor:
        """Return the matrix [1 or B, N, N] with its zeros."""
        order = self.bands[-1].shape[-1]
        return torch.cat([torch.nn.functional.pad(band, (0, order - band.shape[-1])) for band in self.bands], dim=-2)


def bands(matrix: Tensor) -> tuple[Tensor, ...]:
    """Return the bands of a lower triangular matrix [N, N]."""
    order = len(matrix)
    count = max(1, min(8, order // BAND))
    edges = [order * i // count for i in range(count + 1)]
    return tuple(matrix[lo:hi, :hi] for lo, hi in zip(edges[:-1], edges[1:], strict=True))


class MatrixStore:
    """A cache of tuples of matrices, built on first use; the least recently used ones go when a bound is passed."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        """Number of bytes held now, over all devices."""
        self._entries: OrderedDict[Hashable, tuple[Tensor, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable, build: Callable[[], Sequence[Tensor]]) -> tuple[Tensor, ...]:
        """Return the matrices [batch, ...] of `key`, built by `build` if they are not in the cache."""
        entry = self._entries.get(key)
        if entry is None:
            # a matrix first built under inference_mode must still be usable in training
            with torch.inference_mode(False):
                entry = tuple(build())
            self._entries[key] = entry
            self.nbytes += sum(matrix.nbytes for matrix in entry)
            while self.nbytes > self.max_bytes and len(self._entries) > 1:
                _, oldest = self._entries.popitem(last=False)
                self.nbytes -= sum(matrix.nbytes for matrix in oldest)
        self._entries.move_to_end(key)
        return entry


def store_bound() -> int:
    """Return the bytes of matrices that a process keeps at most: $MEGAMEM_BANK_GIB, 2 GiB if unset."""
    text = os.environ.get("MEGAMEM_BANK_GIB", "2")
    try:
        gib = float(text)
    except ValueError:
        gib = -1.0
    if not 0 < gib < float("inf"):
        raise ConfigError(f"MEGAMEM_BANK_GIB={text}: give a positive number of GiB")
    return int(gib * 2**30)


STORE = MatrixStore(store_bound())
"""The store of this process, which all layers share."""


@dataclass(frozen=True)
class HippoBank:
    """The matrices of one layer's shape, by position.

    In its methods `starts` are host integers, one per batch row: the tokens that the row has seen before the block.
    They need not be multiples of the block. Rows that stand at one position share one matrix. The functions that build
    the matrices count in time: n tokens have come at time n + first_token.
    """

    order: int
    block: int
    samples: int
    sampling: Sampling
    offset: float
    alpha: float | None = None
    points: tuple[float, ...] = ()
    discretization: Discretization = "zoh"
    first_token: Literal[0, 1] = 0
    """Time at which the first token of a document enters."""
    dtype: torch.dtype = torch.float32
    store: MatrixStore = STORE

    def update_matrices(self, starts: tuple[int, ...], device: torch.device) -> tuple[LowerTriangular, Tensor]:
        """Return (P, K) of state' = P state + K block: [1 or B, N, N] and [1 or B, N, L]."""
        (additive,) = self._of_rows(self._kernel, starts, device)
        return LowerTriangular(self._of_rows(self._transition, starts, device)), additive

    def reconstruction(self, starts: tuple[int, ...], device: torch.device) -> Tensor:
        """Return R of memory = R state, [1 or B, S, N], for states of `starts` tokens; zero where a start is 0."""
        return self._of_rows(self._reconstruction, starts, device)[0]

    def _of_rows(
        self,
        one: Callable[[int, torch.device], tuple[Tensor, ...]],
        starts: tuple[int, ...],
        device: torch.device,
    ) -> tuple[Tensor, ...]:
        """Return the matrices [1, ...] that `one` gives for a position, or those of all rows [batch, ...]."""
        if len(set(starts)) == 1:
            return one(starts[0], device)
        return tuple(torch.cat(parts) for parts in zip(*(one(start, device) for start in starts), strict=True))

    @property
    def _reading(self) -> Hashable:
        return (self.samples, self.sampling, self.offset, self.alpha, self.points)

    def _interval(self, start: int) -> tuple[int, int]:
        """Return the times at which a block of tokens begins and ends."""
        return start + self.first_token, start + self.first_token + self.block

    def _transition(self, start: int, device: torch.device) -> tuple[Tensor, ...]:
        interval = self._interval(start)
        exact = self.discretization == "zoh"
        ratio = Fraction(*interval)
        where = (ratio.numerator, ratio.denominator) if exact else interval

        def build() -> tuple[Tensor, ...]:
            return bands(transition(self.order, *where) if exact else self._stepped(interval)[0])

        return self._kept("P", start, where, build, device)

    def _kernel(self, start: int, device: torch.device) -> tuple[Tensor, ...]:
        interval = self._interval(start)

        def build() -> tuple[Tensor, ...]:
            return (kernel(self.order, *interval) if self.discretization == "zoh" else self._stepped(interval)[1],)

        return self._kept("K", start, interval, build, device)

    def _kept(
        self,
        kind: str,
        start: int,
        where: tuple[int, int],
        build: Callable[[], tuple[Tensor, ...]],
        device: torch.device,
    ) -> tuple[Tensor, ...]:
        """Return the matrices [1, N, ...] of an update: from the store, from disk where that is worth it, or built."""

        name = f"hippo-{self.discretization}-{kind}-{self.order}-{where[0]}-{where[1]}"
        on_disk = self.dtype == torch.float32 and self._worth_a_file(start)

        def ready() -> list[Tensor]:
            return [matrix.to(self.dtype).contiguous() for matrix in build()]

        def make() -> list[Tensor]:
            return [_upload(matrix, device)[None] for matrix in (cached(name, ready) if on_disk else ready())]

        return self.store.get((kind, self.order, where, self.discretization, device, self.dtype), make)

    def _worth_a_file(self, start: int) -> bool:
        """Return whether matrices may be needed again: long streams and padded rows stand at ever new places."""
        again = start % self.block == 0 and start < BLOCKS_ON_DISK * self.block
        return again and self.order >= ON_DISK[self.discretization == "zoh"]

    def _stepped(self, interval: tuple[int, int]) -> tuple[Tensor, Tensor]:
        return stepped(self.discretization, self.order, *interval)

    def _reconstruction(self, start: int, device: torch.device) -> tuple[Tensor, ...]:
        # without an offset the points are fixed fractions of the history, so that R is the same at all positions
        scaled = self.offset == 0 and (self.sampling != "exponential" or self.alpha is not None)
        time = start + self.first_token if start else 0
        where = min(time, 1) if scaled else time

        def build() -> list[Tensor]:
            if start == 0:
                read = torch.zeros(self.samples, self.order, dtype=torch.float64, device="cpu")
            else:
                at = sample_points(time, self.samples, self.sampling, self.offset, self.alpha, self.points)
                read = reconstruction(self.order, time, at)
            return [_upload(read.to(self.dtype), device)[None]]

        return self.store.get(("R", self.order, where, self._reading, device, self.dtype), build)


def _upload(matrix: Tensor, device: torch.device) -> Tensor:
    """Copy a matrix [N, ...] to `device` without making the host wait for it."""
    matrix = matrix.contiguous()
    if device.type == "cuda":  # a copy from pageable memory makes the host wait
        matrix = matrix.pin_memory()
    return matrix.to(device, non_blocking=True)
