"""Scaling laws fitted to a study's losses, with intervals by bootstrap.

A law is a sum of powers over a floor: L = E + sum_i A_i / x_i^{a_i}. With parameters and tokens as x it is that of
Hoffmann et al., "Training Compute-Optimal Large Language Models", 2022, equation 2, fitted as in their appendix D.2 (a
Huber loss of log L); with the size of a memory as the only x it says what more memory is worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize, nnls
from scipy.special import logsumexp

Array = npt.NDArray[np.float64]
HUBER = 1e-3
"""Residuals of log L beyond which the objective grows linearly (Hoffmann et al.)."""
EXPONENTS = np.linspace(0.05, 1.25, 13)
"""Where the search begins, for each variable."""
POLISHED = 5
"""Starts that are followed to their minimum."""
LEVEL = 0.9
"""Of all intervals."""
RESAMPLES = 200


class FitError(ValueError):
    """There are too few or unsuitable points for a law."""


@dataclass(frozen=True)
class Estimate:
    """A value and its bootstrap interval of level `LEVEL`."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4g} ({self.low:.4g} to {self.high:.4g})"


@dataclass(frozen=True)
class Law:
    """L = floor + sum_i scales[i] / x_i^exponents[i]."""

    floor: float
    scales: tuple[float, ...]
    exponents: tuple[float, ...]

    def __call__(self, x: Array) -> Array:
        """Losses [points] at x [points, variables]."""
        powers = np.asarray(x, dtype=np.float64) ** -np.array(self.exponents)
        return self.floor + powers @ np.array(self.scales)


@dataclass(frozen=True)
class Fit:
    """A law with what is known of it."""

    law: Law
    resampled: tuple[Law, ...]
    """The same, fitted to each resampled set of losses."""
    names: tuple[str, ...]
    """Of the variables."""
    residual: float
    """Root of the mean squared residual of log L, each of the law's constants counted as a point less."""

    @property
    def estimates(self) -> dict[str, Estimate]:
        """Floor, scales and exponents by name: `floor`, `scale of tokens`, `exponent of tokens`."""
        found = {"floor": self._estimate(lambda law: law.floor)}
        for i, name in enumerate(self.names):
            found[f"scale of {name}"] = self._estimate(lambda law, i=i: law.scales[i])
            found[f"exponent of {name}"] = self._estimate(lambda law, i=i: law.exponents[i])
        return found

    def predict(self, x: Sequence[float]) -> Estimate:
        """The loss at one point, one value for each variable."""
        at = np.array([x], dtype=np.float64)
        return self._estimate(lambda law: float(law(at)[0]))

    def _estimate(self, of: object) -> Estimate:
        assert callable(of)
        low, high = np.quantile([of(law) for law in self.resampled], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return Estimate(float(of(self.law)), float(low), float(high))


def fit_law(
    x: npt.ArrayLike, loss: npt.ArrayLike, names: Sequence[str], resamples: int = RESAMPLES, seed: int = 0
) -> Fit:
    """Fit a law to losses.

    Intervals: residuals of log L, scaled up by sqrt(points / (points - constants)), are drawn with replacement and
    added to the fitted losses; the law is fitted to each such set. (Points themselves are not drawn: a grid of runs from
    which a size is missing says something else.)

    Args:
        x: [points, variables], positive.
        loss: [points], positive, nats per token.
        names: of the variables.
    Raises: FitError where there are not more points than constants, a variable has fewer than three values, or
        anything is not positive.
    """
    x, loss = np.asarray(x, dtype=np.float64), np.asarray(loss, dtype=np.float64)
    if x.ndim == 1:
        x = x[:, None]
    constants = 1 + 2 * x.shape[1]
    if len(loss) <= constants:
        raise FitError(f"a law of {', '.join(names)} has {constants} constants; {len(loss)} losses are too few")
    if not (np.isfinite(x).all() and np.isfinite(loss).all() and (x > 0).all() and (loss > 0).all()):
        raise FitError("sizes and losses of a law must be positive and finite")
    for column, name in zip(x.T, names, strict=True):
        if len(np.unique(column)) < 3:
            raise FitError(f"a law needs at least 3 values of {name}, got {sorted(set(column.tolist()))}")
    centre = np.exp(np.log(x).mean(0))
    logs, target = np.log(x / centre), np.log(loss)
    starts = _starts(logs, loss)
    best = min((_polish(start, logs, target) for start in starts), key=lambda found: found[1])[0]
    fitted = _log_loss(best, logs)
    residuals = (target - fitted) * np.sqrt(len(loss) / (len(loss) - constants))
    generator = np.random.default_rng(seed)
    drawn = (fitted + generator.choice(residuals, len(residuals)) for _ in range(resamples))
    again = tuple(_law(_polish(best, logs, again)[0], centre) for again in drawn)
    return Fit(_law(best, centre), again, tuple(names), float(np.sqrt((residuals**2).mean())))


def _law(theta: Array, centre: Array) -> Law:
    """From logarithms of floor and of the terms at the centre, and exponents."""
    floor, terms, exponents = _parts(theta)
    return Law(float(np.exp(floor)), tuple((np.exp(terms) * centre**exponents).tolist()), tuple(exponents.tolist()))


def _parts(theta: Array) -> tuple[float, Array, Array]:
    variables = (len(theta) - 1) // 2
    return float(theta[0]), theta[1 : 1 + variables], theta[1 + variables :]


def _log_loss(theta: Array, logs: Array) -> Array:
    floor, terms, exponents = _parts(theta)
    parts = np.column_stack([np.full(len(logs), floor), terms - exponents * logs])
    return np.asarray(logsumexp(parts, axis=1))


def _objective(theta: Array, logs: Array, target: Array) -> tuple[float, Array]:
    """Huber loss of the residuals of log L and its gradient."""
    floor, terms, exponents = _parts(theta)
    parts = np.column_stack([np.full(len(logs), floor), terms - exponents * logs])
    total = logsumexp(parts, axis=1)
    residual = total - target
    size = np.abs(residual)
    value = np.where(size <= HUBER, 0.5 * residual**2, HUBER * (size - 0.5 * HUBER)).sum()
    slope = np.clip(residual, -HUBER, HUBER)[:, None] * np.exp(parts - total[:, None])
    gradient = np.concatenate([slope.sum(0), (-slope[:, 1:] * logs).sum(0)])
    # the optimizer's tolerances are for values near 1
    return float(value / HUBER**2), gradient / HUBER**2


def _polish(theta: Array, logs: Array, target: Array) -> tuple[Array, float]:
    """The minimum near `theta` and its value."""
    variables = logs.shape[1]
    bounds = [(-20.0, 10.0)] * (1 + variables) + [(1e-3, 4.0)] * variables
    found = minimize(_objective, theta, (logs, target), "L-BFGS-B", jac=True, bounds=bounds, options={"maxiter": 2000})
    return np.asarray(found.x), float(found.fun)


def _starts(logs: Array, loss: Array) -> list[Array]:
    """Where to begin: with the exponents fixed, floor and terms are a least-squares problem without negative values."""
    found = []
    for exponents in product(EXPONENTS, repeat=logs.shape[1]):
        powers = np.exp(-np.array(exponents) * logs)
        columns = np.column_stack([np.ones(len(loss)), powers]) / loss[:, None]
        weights, error = nnls(columns, np.ones(len(loss)))
        found.append((error, np.concatenate([np.log(np.maximum(weights, 1e-6)), exponents])))
    found.sort(key=lambda item: item[0])
    return [start for _, start in found[:POLISHED]]


@dataclass(frozen=True)
class IsoFlop:
    """One compute budget: a parabola of loss over log10 size, and its minimum."""

    budget: float
    """Training FLOPs."""
    parabola: tuple[float, float, float]
    """Coefficients of log10(size)^2, log10(size), 1."""

    @property
    def best_size(self) -> float:
        """Where the loss is least."""
        return float(10 ** (-self.parabola[1] / (2 * self.parabola[0])))

    def __call__(self, size: Array) -> Array:
        """Losses at sizes."""
        return np.polyval(self.parabola, np.log10(size))


def iso_flop(budget: float, sizes: npt.ArrayLike, loss: npt.ArrayLike) -> IsoFlop:
    """Hoffmann et al., approach 2. Raises FitError for fewer than three sizes or a curve without a minimum."""
    sizes, loss = np.asarray(sizes, dtype=np.float64), np.asarray(loss, dtype=np.float64)
    if len(np.unique(sizes)) < 3:
        raise FitError(f"budget {budget:.3g}: a parabola needs at least 3 sizes, got {len(np.unique(sizes))}")
    found = IsoFlop(budget, tuple(np.polyfit(np.log10(sizes), loss, 2)))  # type: ignore[arg-type]
    if found.parabola[0] <= 0:
        raise FitError(f"budget {budget:.3g}: the loss has no minimum among the sizes {sizes.min():.3g} to {sizes.max():.3g}")
    return found


def power(x: npt.ArrayLike, y: npt.ArrayLike) -> tuple[float, float]:
    """(scale, exponent) of y = scale x^exponent through points, by least squares of the logarithms."""
    exponent, scale = np.polyfit(np.log(np.asarray(x, dtype=np.float64)), np.log(np.asarray(y, dtype=np.float64)), 1)
    return float(np.exp(scale)), float(exponent)


def tokens_to(target: float, tokens: Sequence[float], loss: Sequence[float]) -> float | None:
    """Tokens after which a curve first is at or below `target`, between two points along log tokens; None if never."""
    for i, value in enumerate(loss):
        if value > target:
            continue
        if i == 0 or loss[i - 1] <= value:
            return float(tokens[i])
        share = (loss[i - 1] - target) / (loss[i - 1] - value)
        return float(np.exp(np.log(tokens[i - 1]) + share * (np.log(tokens[i]) - np.log(tokens[i - 1]))))
    return None
