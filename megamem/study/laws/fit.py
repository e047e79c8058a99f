"""Scaling laws fitted to losses, with intervals by bootstrap.

A law is a sum of powers over a floor: L = E + sum_i A_i / x_i^{a_i}. With parameters and tokens as x it is that of
Hoffmann et al., "Training Compute-Optimal Large Language Models", 2022, equation 2; with the size of a memory as the
only x it says what more memory is worth. Curves of equal compute are their approach 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares, nnls
from scipy.special import logsumexp
from scipy.stats import norm as normal
from scipy.stats import t as student

Array = npt.NDArray[np.float64]
HUBER = 1.345
"""Standard deviations beyond which a residual counts linearly; for normal residuals that wastes 5 % (Huber 1964)."""
LEAST_BEND = 1e-6
"""Least residual of log L from which the loss is linear: losses without noise have residuals of rounding only."""
EXPONENTS = np.linspace(0.05, 1.25, 13)
"""Exponents at which the search begins, for each variable."""
LOG_BOUNDS, EXPONENT_BOUNDS = (-20.0, 10.0), (1e-3, 4.0)
"""Bounds of the search: for logarithms of floor and terms, and for exponents."""
POLISHED = 5
"""Number of starts that are followed to their minimum."""
LEAST_SHARE = 0.01
"""Least share of the loss at the center that floor and terms have where a refit begins: at a floor of 0 it may stop."""
LEVEL = 0.9
"""Probability of all intervals."""
QUANTILES = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)
RESAMPLES = 200
LEAST_REMAINDER = 1e-6
"""Least share of a group's deviations that its own pull leaves: with less, it alone decides a part of the fit."""


class FitError(ValueError):
    """There are too few or unsuitable points for a law."""


@dataclass(frozen=True)
class Estimate:
    """A value and its bootstrap interval of level `LEVEL`."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """Return the value with its interval in brackets."""
        return f"{self.value:.4g} ({self.low:.4g} to {self.high:.4g})"


@dataclass(frozen=True)
class Law:
    """A law of losses: L = floor + sum_i scales[i] / x_i^exponents[i]."""

    floor: float
    scales: tuple[float, ...]
    exponents: tuple[float, ...]

    def __call__(self, x: npt.ArrayLike) -> Array:
        """Return losses [points] at x [points, variables]."""
        powers = np.asarray(x, dtype=np.float64) ** -np.array(self.exponents)
        return self.floor + powers @ np.array(self.scales)


@dataclass(frozen=True)
class Fit:
    """A fitted law with its uncertainty."""

    law: Law
    resampled: tuple[Law, ...]
    """The law as fitted to each resampled set of losses."""
    names: tuple[str, ...]
    """Names of the variables."""
    points: int
    """Number of losses that it was fitted to."""
    residual: float
    """Root of the mean squared residual of log L, each of the law's constants counted as a point less."""

    @property
    def estimates(self) -> dict[str, Estimate]:
        """Floor, scales and exponents by name: `floor`, `scale of tokens`, `exponent of tokens`."""
        found = {"floor": self.estimate(lambda law: law.floor)}
        for i, name in enumerate(self.names):
            found[f"scale of {name}"] = self.estimate(lambda law, i=i: law.scales[i])  # type: ignore[misc]
            found[f"exponent of {name}"] = self.estimate(lambda law, i=i: law.exponents[i])  # type: ignore[misc]
        return found

    @property
    def undecided(self) -> list[str]:
        """Variables whose exponent's interval ends where the search does: the losses leave it open."""
        ends = [(name, self.estimates[f"exponent of {name}"]) for name in self.names]
        low, high = EXPONENT_BOUNDS
        return [name for name, e in ends if e.low < 1.01 * low or e.high > 0.99 * high]

    def predict(self, x: npt.ArrayLike) -> tuple[Array, Array, Array]:
        """Return losses, lower ends and upper ends of their intervals, [points] each, at x [points, variables]."""
        low, high = np.quantile([law(x) for law in self.resampled], QUANTILES, axis=0)
        return self.law(x), low, high

    def estimate(self, of: Callable[[Law], float]) -> Estimate:
        """Return a number that follows from the law, with its interval. of: computes the number."""
        low, high = np.quantile([of(law) for law in self.resampled], QUANTILES)
        return Estimate(of(self.law), float(low), float(high))


def fit_law(
    x: npt.ArrayLike,
    loss: npt.ArrayLike,
    names: Sequence[str],
    groups: Sequence[object] | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Fit:
    """Fit a law to losses, by a Huber loss of the residuals of log L.

    Intervals: each residual keeps or changes its sign by chance and is added to the fitted loss; the law is fitted to
    each such set (a wild bootstrap). Points themselves are not drawn: a grid of runs from which a size is missing says
    something else. So that few points do not make intervals too short, residuals are first taken as if their own group
    had been left out of the fit, and scaled up as Student's t is wider than the normal distribution.

    Args:
        x: [points, variables], positive.
        loss: [points], positive, nats per token.
        names: of the variables.
        groups: [points], the run that each point comes from; points of one run err together, so their signs change
            together, and a constant that differs between runs only is known from so many runs. Each point is a group
            of its own if not given.

    Raises: FitError where there are not more points (or groups) than constants, a variable has fewer than three
        values, variables change together only, anything is not positive, the losses do not decide an exponent, or one
        group alone decides a part of the law.
    """
    x, loss = np.asarray(x, dtype=np.float64), np.asarray(loss, dtype=np.float64)
    _check(x, loss, names)
    named = [f"point {i}" for i in range(len(loss))] if groups is None else list(map(str, groups))
    members = np.unique(named, return_inverse=True)[1]
    count = members.max() + 1
    # a variable that is the same within each run is known from the runs alone, however many points they have
    constants = 1 + 2 * sum(_same_within(column, members) for column in x.T)
    if count <= constants:
        raise FitError(f"{constants} of the constants depend on what differs between runs; {count} runs are too few")
    # logarithms around the center: the constants of the search are then of similar size
    center = np.exp(np.log(x).mean(0))
    logs, target = np.log(x / center), np.log(loss)
    best, bend = _best(logs, loss)
    for name, exponent in zip(names, best[1 + len(names) :], strict=True):
        if min(abs(exponent - border) for border in EXPONENT_BOUNDS) < 1e-6:
            raise FitError(f"the losses do not decide the exponent of {name}: {exponent:.3g} ends the search")
    fitted, slopes = log_loss(best, logs)
    residuals = target - fitted
    # the wild bootstrap: residuals with random signs, one sign for each group, on the fitted losses
    widened = leave_group_out(residuals, slopes, named) * student_factor(count - constants)
    generator = np.random.default_rng(seed)
    begin, resampled = lifted(best, len(names)), []
    for _ in range(resamples):
        signs = generator.choice([-1.0, 1.0], count)[members]
        resampled.append(_law(polish(begin, logs, fitted + signs * widened, bend)[0], center))
    error = float(np.sqrt((residuals**2).sum() / (len(loss) - len(best))))
    return Fit(_law(best, center), tuple(resampled), tuple(names), len(loss), error)


def leave_group_out(residuals: Array, slopes: Array, groups: Sequence[str]) -> Array:
    """Return residuals [points] as if their own group had been left out of the fit (the jackknife's, to first order).

    Args:
        slopes: [points, constants], derivatives of the fitted values.
        groups: [points], the run that each point comes from.

    Raises: FitError where a group alone decides a part of the fit: its residuals are rounding errors then.
    """
    # the fit projects deviations on the span of the slopes; its orthonormal basis gives the hat matrix basis basis^T
    basis, corrected, named = np.linalg.qr(slopes)[0], np.empty_like(residuals), np.array(groups)
    for group in dict.fromkeys(groups):
        here = named == group
        # I - H of the group: what the fit leaves of its deviations
        remainder = np.eye(here.sum()) - basis[here] @ basis[here].T
        if np.linalg.eigvalsh(remainder)[0] < LEAST_REMAINDER:
            raise FitError(f"{group} alone decides a part of the fit, and nothing tells by how much it errs; add seeds")
        corrected[here] = np.linalg.solve(remainder, residuals[here])
    return corrected


def _same_within(column: Array, members: npt.NDArray[np.int64]) -> bool:
    """Return whether a variable has one value in each group."""
    return all(np.ptp(column[members == group]) == 0 for group in np.unique(members))


def student_factor(freedom: int) -> float:
    """Return the ratio of an interval of Student's t with so many degrees of freedom to that of a normal one."""
    return float(student.ppf(QUANTILES[1], freedom) / normal.ppf(QUANTILES[1]))


def _check(x: Array, loss: Array, names: Sequence[str]) -> None:
    """Raise FitError where points [points, variables] and losses [points] cannot decide a law; see `fit_law`."""
    constants = 1 + 2 * len(names)
    if len(loss) <= constants:
        raise FitError(f"a law of {' and '.join(names)} has {constants} constants; {len(loss)} losses are too few")
    if not (np.isfinite(x).all() and np.isfinite(loss).all() and (x > 0).all() and (loss > 0).all()):
        raise FitError(f"{', '.join(names)} and the losses must be positive and finite")
    for column, name in zip(x.T, names, strict=True):
        if len(values := np.unique(column)) < 3:
            raise FitError(f"a law needs at least 3 values of {name}, got {', '.join(f'{v:g}' for v in values)}")
    logs = np.log(x) - np.log(x).mean(0)
    spread = np.linalg.svd(logs / np.linalg.norm(logs, axis=0), compute_uv=False)
    if spread.min() < 1e-2:
        raise FitError(f"{' and '.join(names)} change together only: their parts cannot be told apart")


def _law(theta: Array, center: Array) -> Law:
    """Return the law from its constants in the search, which `log_loss` describes."""
    count = len(center)
    scales = np.exp(theta[1 : 1 + count]) * center ** theta[1 + count :]
    return Law(float(np.exp(theta[0])), tuple(scales.tolist()), tuple(theta[1 + count :].tolist()))


def log_loss(theta: Array, logs: Array) -> tuple[Array, Array]:
    """Return the logarithm of a law [points], and its derivatives [points, constants].

    Args:
        theta: logarithms of the floor and of each term at the center, then exponents.
        logs: [points, variables], logarithms of x over the center.
    """
    count = logs.shape[1]
    # logarithms of the floor and of each term at the points; their sum in the logarithm is a logsumexp
    parts = np.column_stack([np.full(len(logs), theta[0]), theta[1 : 1 + count] - theta[1 + count :] * logs])
    total = logsumexp(parts, axis=1)
    shares = np.exp(parts - total[:, None])
    return np.asarray(total), np.concatenate([shares, -shares[:, 1:] * logs], axis=1)


def polish(theta: Array, logs: Array, target: Array, bend: float) -> tuple[Array, float]:
    """Return the minimum of the Huber loss near `theta`, and its value.

    Args:
        theta, logs: see `log_loss`.
        target: [points], logarithms of the losses.
        bend: residual of log L from which on the loss is linear.
    """
    count = logs.shape[1]
    low, high = np.array([LOG_BOUNDS] * (1 + count) + [EXPONENT_BOUNDS] * count).T
    # scipy's Huber loss with f_scale: quadratic up to `bend`, linear beyond
    found = least_squares(
        lambda at: log_loss(at, logs)[0] - target,
        np.minimum(np.maximum(theta, low + 1e-9), high - 1e-9),
        jac=lambda at: log_loss(at, logs)[1],
        bounds=(low, high), loss="huber", f_scale=bend, x_scale="jac", max_nfev=500,
    )  # fmt: skip
    return np.asarray(found.x), float(found.cost)


def lifted(theta: Array, variables: int) -> Array:
    """Return `theta` with floor and terms of at least `LEAST_SHARE`."""
    raised, terms = theta.copy(), theta[: 1 + variables]
    raised[: 1 + variables] = np.maximum(terms, logsumexp(terms) + np.log(LEAST_SHARE))
    return raised


def _best(logs: Array, loss: Array) -> tuple[Array, float]:
    """Return the minimum over all starts, and the bend, from the residuals' deviation in a least-squares fit."""
    target, starts = np.log(loss), _starts(logs, loss)
    plain = min((polish(start, logs, target, bend=1.0) for start in starts), key=lambda found: found[1])[0]
    # a robust estimate of their standard deviation: the median over that of a normal distribution
    residuals = np.abs(target - log_loss(plain, logs)[0]) * np.sqrt(len(loss) / (len(loss) - len(plain)))
    bend = max(HUBER * float(np.median(residuals)) / float(normal.ppf(0.75)), LEAST_BEND)
    found = [polish(start, logs, target, bend) for start in [plain, *starts]]
    return min(found, key=lambda item: item[1])[0], bend


def _starts(logs: Array, loss: Array) -> list[Array]:
    """Return the starts: with fixed exponents, floor and terms solve a non-negative least-squares problem."""
    found = []
    for exponents in product(EXPONENTS, repeat=logs.shape[1]):
        powers = np.exp(-np.array(exponents) * logs)
        weights, error = nnls(np.column_stack([np.ones(len(loss)), powers]) / loss[:, None], np.ones(len(loss)))
        found.append((error, np.concatenate([np.log(np.maximum(weights, 1e-6)), exponents])))
    found.sort(key=lambda item: item[0])
    return [start for _, start in found[:POLISHED]]
