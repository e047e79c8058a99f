"""The best size for a budget of compute, and the training tokens that a loss takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megamem.study.laws.fit import QUANTILES, RESAMPLES, Array, Estimate, FitError, leave_group_out, student_factor

CONSTANTS = 3
"""Number of constants of a parabola."""
RESAMPLES_WITH_MINIMUM = 0.95
"""Least share of resamples with a minimum: of fewer, the interval would be of those that happen to have one."""


@dataclass(frozen=True)
class Parabola:
    """Loss over log10 size at one budget (Hoffmann et al. 2022, approach 2)."""

    budget: float
    """Training FLOPs."""
    sizes: tuple[float, ...]
    losses: tuple[float, ...]
    runs: tuple[str, ...]
    """The runs that the losses are of. One run may give losses to several budgets."""
    coefficients: tuple[float, float, float]
    """Factors of log10(size)^2, of log10(size) and of 1."""

    @property
    def best_size(self) -> float:
        """The size with the least loss."""
        return float(10 ** (-self.coefficients[1] / (2 * self.coefficients[0])))

    @property
    def best_loss(self) -> float:
        """The loss at the best size."""
        return float(self(self.best_size))

    def __call__(self, size: npt.ArrayLike) -> Array:
        """Return the losses at sizes."""
        return np.asarray(np.polyval(self.coefficients, np.log10(size)))


def parabola(budget: float, points: Sequence[tuple[float, float, str]]) -> Parabola:
    """Fit a parabola through (size, loss, run) by least squares.

    Raises: FitError for fewer than three sizes, for one that has no logarithm or a curve without a minimum among them.
    """
    sizes, losses = [size for size, _, _ in points], [loss for _, loss, _ in points]
    if not (np.isfinite([*sizes, *losses]).all() and min(sizes, default=1) > 0):
        raise FitError(f"budget {budget:.3g}: sizes must be positive, and sizes and losses finite")
    distinct = sorted(set(sizes))
    if len(distinct) < 3:
        raise FitError(f"budget {budget:.3g}: a parabola needs at least 3 sizes, got {len(distinct)}")
    square, slope, floor = np.polyfit(np.log10(sizes), losses, 2)
    if square <= 0 or not np.log10(distinct[0]) <= -slope / (2 * square) <= np.log10(distinct[-1]):
        raise FitError(
            f"budget {budget:.3g}: the loss has no minimum among the sizes {distinct[0]:.3g} to {distinct[-1]:.3g}"
        )
    runs, coefficients = tuple(run for _, _, run in points), (float(square), float(slope), float(floor))
    return Parabola(budget, tuple(sizes), tuple(losses), runs, coefficients)


@dataclass(frozen=True)
class BestSize:
    """The law of the best size: scale * budget^exponent."""

    scale: float
    exponent: Estimate

    def __call__(self, budget: npt.ArrayLike) -> Array:
        """Return the best sizes for budgets."""
        return self.scale * np.asarray(budget, dtype=np.float64) ** self.exponent.value


def best_size(curves: Sequence[Parabola], resamples: int = RESAMPLES, seed: int = 0) -> BestSize:
    """Fit how the best size grows with the budget, by least squares of the logarithms.

    Interval: the residuals of each run change their signs by chance, at all budgets together, corrected and scaled up
    as in `fit_law`. There are as many runs as losses or fewer, so degrees of freedom are counted in runs.

    Raises: FitError for fewer than two budgets, where one run alone decides a part of a parabola, or where resampled
        parabolas lose their minimum: then the losses do not decide.
    """
    if len(curves) < 2:
        raise FitError(f"best sizes by budget need at least 2 budgets with a minimum, got {len(curves)}")
    runs = sorted({run for curve in curves for run in curve.runs})
    corrected = [_corrected_residuals(curve) for curve in curves]
    widened = [residuals * student_factor(len(runs) - CONSTANTS) for residuals in corrected]
    members = [np.searchsorted(runs, curve.runs) for curve in curves]
    generator = np.random.default_rng(seed)
    budgets = np.log([curve.budget for curve in curves])
    exponents = []
    for _ in range(resamples):
        # one sign for each run, at all budgets
        signs, best = generator.choice([-1.0, 1.0], len(runs)), []
        for curve, residuals, mine in zip(curves, widened, members, strict=True):
            losses = curve(curve.sizes) + signs[mine] * residuals
            square, slope, _ = np.polyfit(np.log10(curve.sizes), losses, 2)
            if square > 0:
                best.append(-slope / (2 * square))
        if len(best) == len(curves):
            exponents.append(np.polyfit(budgets, np.array(best) * np.log(10), 1)[0])
    if len(exponents) < RESAMPLES_WITH_MINIMUM * resamples:
        raise FitError("the spread of the losses is too large for a best size: resampled curves have no minimum")
    exponent, log_scale = np.polyfit(budgets, np.log([curve.best_size for curve in curves]), 1)
    low, high = np.quantile(exponents, QUANTILES)
    return BestSize(float(np.exp(log_scale)), Estimate(float(exponent), float(low), float(high)))


def _corrected_residuals(curve: Parabola) -> Array:
    """Return a parabola's residuals as if each run had been left out of its fit."""
    logs = np.log10(curve.sizes)
    try:
        return leave_group_out(curve.losses - curve(curve.sizes), np.vander(logs - logs.mean(), CONSTANTS), curve.runs)
    except FitError as error:
        raise FitError(f"budget {curve.budget:.3g}: {error}") from None


def tokens_to(target: float, curve: Mapping[float, float]) -> float | None:
    """Return the tokens after which a curve, loss by tokens, first is at or below `target`; None if never.

    Interpolates along log tokens. An upper bound where the first point is at the target already: see `at_once`.
    """
    before: tuple[float, float] | None = None
    for tokens, loss in sorted(curve.items()):
        if loss <= target:
            return tokens if before is None else _between(target, before, (tokens, loss))
        before = tokens, loss
    return None


def at_once(target: float, curve: Mapping[float, float]) -> bool:
    """Return whether the first point of a curve, loss by tokens, is at or below `target`: nobody knows since when."""
    return bool(curve) and curve[min(curve)] <= target


def loss_at(tokens: float, curve: Mapping[float, float]) -> float | None:
    """Return the loss of a curve, loss by tokens, interpolated along log tokens; None outside of its points."""
    known = sorted(curve)
    if not known or not known[0] <= tokens <= known[-1]:
        return None
    return float(np.interp(np.log(tokens), np.log(known), [curve[at] for at in known]))


def _between(target: float, above: tuple[float, float], below: tuple[float, float]) -> float:
    """Return the tokens at which the line between two points, (tokens, loss), has the target loss."""
    share = (above[1] - target) / (above[1] - below[1])
    return float(np.exp(np.log(above[0]) + share * (np.log(below[0]) - np.log(above[0]))))
