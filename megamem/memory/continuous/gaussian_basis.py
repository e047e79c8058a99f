"""A signal over [0, 1] as a sum of Gaussian bumps, fitted by ridge regression: what the infinity-former remembers with.

Martins, Marinho and Martins, "infinity-former: Infinite Memory Transformer", 2022, equations 4, 5, 14, 15, appendix A.
A signal x(t) = B^T psi(t) has N coefficients in each channel. psi_j is the density of a normal distribution. Fitting
vectors X [points, channels] at places t_i is a product with a matrix that depends on the places alone:

    B = (F F^T + lambda I)^-1 F X,    F = [psi(t_1) ... psi(t_points)]

To add L new vectors, the signal is read at M places, which are put into [0, tau], the new vectors into ]tau, 1], and
all are fitted anew. All matrices are computed in float64, once.

Letters of shapes: N basis functions, L tokens of a chunk, M samples of the old signal.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from megamem.ops.tables import kept_table

Padding = Literal["zeros", "none"]


@dataclass(frozen=True)
class Basis:
    """Gaussian bumps with equally spaced centers, at each center one of every width."""

    count: int
    """N, a multiple of the number of widths."""
    widths: tuple[float, ...]
    """Standard deviations."""

    def centers_and_widths(self, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Return centers and widths of all functions, [N] each in float64."""
        centers = torch.linspace(0, 1, self.count // len(self.widths), dtype=torch.float64, device=device)
        widths = torch.tensor(self.widths, dtype=torch.float64).to(device)
        return centers.repeat_interleave(len(self.widths)), widths.repeat(len(centers))

    def values(self, places: Tensor) -> Tensor:
        """Return psi(t) at places [...] float64: [..., N]."""
        centers, widths = self.centers_and_widths(places.device)
        return torch.exp(-0.5 * ((places[..., None] - centers) / widths) ** 2) / (widths * (2 * torch.pi) ** 0.5)


@dataclass(frozen=True)
class Regression:
    """How vectors become a signal, and how a signal takes up further ones."""

    basis: Basis
    ridge: float
    """lambda."""
    tokens: int
    """L, vectors that are added at once."""
    samples: int
    """M, places at which the old signal is read."""
    contraction: float
    """tau, the share of [0, 1] that the old signal keeps."""
    padding: Padding
    """`zeros`: the signal is also fitted to zeros at places in [-0.5, 0[ and ]1, 1.5], as in the authors' code, and the
    first vectors lie in the middle of their intervals; `none`: to the vectors alone, at i / L, as in the paper."""

    def first_places(self) -> tuple[Tensor, Tensor]:
        """Return the places of the first L vectors, and of the zeros around them: float64 [L], [zeros]."""
        if self.padding == "none":
            return _steps(self.tokens), torch.empty(0, dtype=torch.float64)
        places = (torch.arange(-(self.tokens // 2), self.tokens + self.tokens // 2) + 0.5).double() / self.tokens
        inside = (places > 0) & (places < 1)
        return places[inside], places[~inside]

    def later_places(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the places of M samples of the old signal, of L new vectors and of the zeros around them, float64."""
        old = self.contraction * _steps(self.samples)
        new = self.contraction + (1 - self.contraction) * _steps(self.tokens)
        count = self.tokens + self.samples
        if self.padding == "none":
            return old, new, torch.empty(0, dtype=torch.float64)
        around = torch.linspace(-0.5 + 0.5 / count, 1.5 - 0.5 / count, 2 * count, dtype=torch.float64)
        return old, new, around[(around < 0) | (around > 1)]

    def all_first(self) -> Tensor:
        """Return all places of `first_places`, [points]."""
        return torch.cat(self.first_places())

    def all_later(self) -> Tensor:
        """Return all places of `later_places`, [points]."""
        return torch.cat(self.later_places())

    def normal(self, places: Tensor) -> Tensor:
        """Return F F^T + lambda I [N, N] of places [points]."""
        values = self.basis.values(places)
        return values.T @ values + self.ridge * torch.eye(self.basis.count, dtype=torch.float64)

    def operator(self, places: Tensor) -> Tensor:
        """Return (F F^T + lambda I)^-1 F [N, points] of places [points]."""
        factor = torch.linalg.cholesky(self.normal(places))
        return torch.cholesky_solve(self.basis.values(places).T, factor)


@lru_cache(maxsize=32)
def condition_number(regression: Regression) -> float:
    """Return the larger condition number of the two matrices F F^T + lambda I that are solved."""
    worst = 1.0
    for places in (regression.all_first(), regression.all_later()):
        values = torch.linalg.eigvalsh(regression.normal(places))
        worst = max(worst, float(values[-1] / values[0].clamp(min=1e-300)))
    return worst


def _steps(count: int) -> Tensor:
    """Return 1 / count, 2 / count, ..., 1 in float64, [count]."""
    return torch.arange(1, count + 1, dtype=torch.float64) / count


def expected_basis(mean: Tensor, variance: Tensor, centers: Tensor, variances: Tensor) -> Tensor:
    """Return E[psi(t)] for t ~ N(mean, variance): the density of N(center_j, width_j^2 + variance) at the mean.

    mean, variance: [...]; centers, variances: of the basis functions, [N]. Returns: [..., N].
    """
    spread = variance[..., None] + variances
    return torch.exp(-0.5 * (mean[..., None] - centers) ** 2 / spread) / (2 * torch.pi * spread).sqrt()


@dataclass(frozen=True)
class Operators:
    """The matrices of a `Regression`, in one dtype on one device."""

    first: Tensor
    """[N, L]: from the first L vectors to coefficients."""
    old: Tensor
    """[N, M]: from M samples of the old signal to coefficients."""
    new: Tensor
    """[N, L]: from L further vectors to coefficients."""
    contract: Tensor
    """[N, N]: from old coefficients to new ones, if samples are equally spaced: `old` times psi at the samples."""
    centers: Tensor
    """[N] of the basis functions."""
    variances: Tensor
    """[N], squared widths of the basis functions."""


@kept_table(8)
def operators(regression: Regression, dtype: torch.dtype, device: torch.device) -> Operators:
    """Return the matrices of a regression, computed in float64 and kept for all layers."""
    first = regression.operator(regression.all_first())[:, : regression.tokens]
    later = regression.operator(regression.all_later())[:, : regression.samples + regression.tokens]
    old, new = later.split((regression.samples, regression.tokens), dim=1)
    contract = old @ regression.basis.values(_steps(regression.samples))
    centers, widths = regression.basis.centers_and_widths()
    made = (first, old, new, contract, centers, widths.square())
    return Operators(*(tensor.to(dtype=dtype, device=device).contiguous() for tensor in made))
