"""Scaling laws: known constants are found again, intervals cover them, and what cannot be fitted is refused."""

from __future__ import annotations

from functools import partial
from itertools import product

import numpy as np
import pytest

from megamem.study.laws.budgets import Parabola, best_size, loss_at, parabola, tokens_to
from megamem.study.laws.fit import Fit, FitError, Law, fit_law, lifted, log_loss, polish

CHINCHILLA = Law(1.69, (406.4, 410.7), (0.34, 0.28))
"""Hoffmann et al. 2022, equation 10."""
SIZES, TOKENS = np.geomspace(5e7, 1e10, 6), np.geomspace(1e9, 3e11, 6)
GRID = np.array(list(product(SIZES, TOKENS)))
NAMES = ("size", "tokens")


def noisy(law: Law, x: np.ndarray, noise: float, seed: int) -> np.ndarray:
    return law(x) * np.exp(np.random.default_rng(seed).normal(0, noise, len(x)))


def covered(fit: Fit, law: Law) -> dict[str, bool]:
    truth = {"floor": law.floor}
    for name, scale, exponent in zip(fit.names, law.scales, law.exponents, strict=True):
        truth |= {f"scale of {name}": scale, f"exponent of {name}": exponent}
    return {name: estimate.low <= truth[name] <= estimate.high for name, estimate in fit.estimates.items()}


def test_derivatives_are_those_of_finite_differences():
    theta, generator = np.array([0.5, -0.3, 0.4, 0.34, 0.28]), np.random.default_rng(0)
    logs = generator.normal(0, 2, (7, 2))
    steps = 1e-6 * np.eye(5)
    numeric = np.column_stack([(log_loss(theta + s, logs)[0] - log_loss(theta - s, logs)[0]) / 2e-6 for s in steps])
    # central differences of step h are wrong by h^2 and by rounding over h: 1e-12 and 1e-10
    np.testing.assert_allclose(log_loss(theta, logs)[1], numeric, atol=1e-8)


def test_constants_are_found_again_without_noise():
    fit = fit_law(GRID, CHINCHILLA(GRID), NAMES, resamples=2)
    assert fit.law.floor == pytest.approx(1.69, rel=1e-3)
    assert fit.law.scales == pytest.approx((406.4, 410.7), rel=1e-2)
    assert fit.law.exponents == pytest.approx((0.34, 0.28), rel=1e-3)


def test_intervals_contain_the_constants():
    fit = fit_law(GRID, noisy(CHINCHILLA, GRID, 0.003, seed=1), NAMES)
    assert all(covered(fit, CHINCHILLA).values()), fit.estimates
    # a normal deviation's mean over 31 degrees of freedom is within a third of it, 2.6 standard errors
    assert fit.residual == pytest.approx(0.003, rel=0.33)
    far = np.array([[7e10, 1.4e12]])
    value, low, high = (float(end[0]) for end in fit.predict(far))
    assert low < CHINCHILLA(far)[0] < high
    assert low < value < high


def test_intervals_cover_as_often_as_they_say():
    """Of 20 draws of noise, 90 % intervals cover fewer than 15 with a chance of 1.1 % for each constant (binomial);
    intervals so short that they cover every second time reach 15 with one of 2.1 %."""
    law, sizes = Law(2.5, (3.0,), (0.5,)), np.repeat(np.geomspace(1, 64, 7), 2)[:, None]
    fits = [fit_law(sizes, noisy(law, sizes, 0.003, seed), ("memory",), resamples=40) for seed in range(20)]
    hits = {name: sum(covered(fit, law)[name] for fit in fits) for name in fits[0].estimates}
    assert min(hits.values()) >= 15, hits


def test_points_of_one_run_err_together():
    """A deviation that a whole run shares widens the intervals of what runs decide, if the runs are named."""
    runs = np.repeat(np.arange(12), 6)
    x = np.column_stack([np.repeat(np.geomspace(5e7, 1e10, 6), 12), np.tile(TOKENS, 12)])
    shared = np.random.default_rng(5).normal(0, 0.004, 12)[runs]
    losses = noisy(CHINCHILLA, x, 0.001, seed=6) * np.exp(shared)
    wide = fit_law(x, losses, NAMES, groups=runs, resamples=60).estimates["exponent of size"]
    narrow = fit_law(x, losses, NAMES, resamples=60).estimates["exponent of size"]
    assert wide.low <= 0.34 <= wide.high
    # six points of a run count as one: up to sqrt(6) = 2.4 times as long
    assert wide.high - wide.low > 1.5 * (narrow.high - narrow.low)


def test_one_run_that_went_wrong_hardly_counts():
    losses = noisy(CHINCHILLA, GRID, 0.002, seed=3)
    losses[17] *= 1.5
    ours = fit_law(GRID, losses, NAMES, resamples=2).law.exponents[0]
    start, logs = np.array([0.5, -0.5, -0.5, 0.34, 0.28]), np.log(GRID / np.exp(np.log(GRID).mean(0)))
    squares = polish(start, logs, np.log(losses), bend=1.0)[0][3]
    assert abs(squares - 0.34) > 0.15
    assert abs(ours - 0.34) < 0.2 * abs(squares - 0.34)


def test_exponents_that_are_left_open_are_named():
    sizes = np.repeat([1.0, 2.0, 4.0], 2)[:, None]
    fit = fit_law(sizes, noisy(Law(2.5, (3.0,), (0.5,)), sizes, 0.05, seed=1), ("size",), resamples=40)
    assert fit.undecided == ["size"]
    assert fit_law(GRID, noisy(CHINCHILLA, GRID, 0.003, seed=1), NAMES, resamples=40).undecided == []


def test_a_refit_leaves_a_floor_of_nothing():
    """Losses that a bootstrap of a law with a floor of 0 made: another floor fits them better."""
    logs = np.log(np.repeat(np.geomspace(1, 8, 4), 2) / 8**0.5)[:, None]
    losses = np.log([4.423, 3.575, 3.377, 3.490, 2.969, 2.972, 2.661, 2.658])
    fitted = np.array([-19.87, 1.159, 0.2143])
    (there, cost), (better, less) = (polish(at, logs, losses, bend=0.0347) for at in (fitted, lifted(fitted, 1)))
    assert np.exp(there[0]) < 1e-3
    assert np.exp(better[0]) > 1
    assert less < 0.98 * cost
    assert lifted(np.array([1.0, 1.0, 0.1]), 1).tolist() == [1.0, 1.0, 0.1], "what is there stays"


@pytest.mark.parametrize(
    ("x", "loss", "names", "groups", "said"),
    [
        ([[1], [2], [3]], [3, 2, 1], ("size",), None, "a law of size has 3 constants; 3 losses are too few"),
        ([[1], [2], [2], [1]], [3, 2, 2, 3], ("size",), None, "a law needs at least 3 values of size, got 1, 2"),
        ([[0], [1], [2], [3]], [3, 2, 2, 3], ("memory",), None, "memory and the losses must be positive and finite"),
        ([[1], [2], [3], [4]], [3, 2, 2, np.nan], ("size",), None, "must be positive and finite"),
        ([[i, 20 * i] for i in range(1, 8)], range(8, 1, -1), NAMES, None, "size and tokens change together only"),
        ([[1], [2], [4], [8]], [1, 2, 3, 4], ("size",), None, "the losses do not decide the exponent of size"),
        (
            [[i] for i in (1, 1, 2, 2, 4, 4)],
            [3, 3, 2, 2, 1.5, 1.5],
            ("size",),
            [1, 1, 2, 2, 3, 3],
            "3 runs are too few",
        ),
        # the third size says what is between the first two, whatever its loss; only the last can err visibly
        ([[1], [2], [4], [4]], [4, 3, 2.51, 2.5], ("size",), "abcd", "a alone decides a part of the fit"),
    ],
)
def test_what_cannot_be_fitted_is_refused(x, loss, names, groups, said):
    with pytest.raises(FitError) as refused:
        fit_law(x, list(loss), names, groups)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


# --- budgets of compute ---


def valley(budget: float, size: float) -> float:
    """A loss whose best size is budget^0.5."""
    return 2 + 0.1 * (np.log10(size) - 0.5 * np.log10(budget)) ** 2


def valleys(noise: float, seed: int, seeds: tuple[int, ...] = (2, 2, 2, 2, 2)) -> list[Parabola]:
    """Three budgets with runs of their own, so many of each of five sizes."""
    generator = np.random.default_rng(seed)
    found = []
    for budget in (1e12, 1e14, 1e16):
        sizes = [
            (budget**0.5 * factor, i) for factor, n in zip((0.1, 0.3, 1, 3, 10), seeds, strict=True) for i in range(n)
        ]
        points = [(size, valley(budget, size) + generator.normal(0, noise), f"{size}-{i}") for size, i in sizes]
        found.append(parabola(budget, points))
    return found


def valleys_of_runs(seed: int) -> list[Parabola]:
    """Nine runs that err as a whole; each gives losses to all five budgets that its size is near of."""
    generator, sizes = np.random.default_rng(seed), np.geomspace(1e5, 1e9, 9)
    shared = generator.normal(0, 0.005, 9)
    near = lambda budget, size: abs(np.log10(size / budget**0.5)) < 1.1  # noqa: E731
    return [
        parabola(b, [(s, valley(b, s) + err, f"run {s}") for s, err in zip(sizes, shared, strict=True) if near(b, s)])
        for b in np.geomspace(1e12, 1e16, 5)
    ]


def one_seed(losses: list[float]) -> list[tuple[float, float, str]]:
    """Points of sizes 1, 10, 100 and so on."""
    return [(10.0**i, loss, f"run {i}") for i, loss in enumerate(losses)]


def test_the_best_size_grows_with_the_budget():
    exact = valleys(0, 0)
    assert [one.best_size for one in exact] == pytest.approx([1e6, 1e7, 1e8])
    assert [one.best_loss for one in exact] == pytest.approx([2, 2, 2])
    growth = best_size(exact)
    assert (growth.scale, growth.exponent.value) == (pytest.approx(1), pytest.approx(0.5))
    assert growth([1e18]) == pytest.approx([1e9])
    assert all(
        one.low < one.value < one.high for one in (best_size(valleys(0.005, seed)).exponent for seed in range(3))
    )


@pytest.mark.parametrize("drawn", [partial(valleys, 0.005), valleys_of_runs], ids=["final points", "validations"])
def test_intervals_of_the_exponent_cover(drawn):
    """Of 30 draws, 90 % intervals cover fewer than 24 with a chance of 2.6 % (binomial). Residuals that are scaled up
    all alike covered 23 of final points, and signs drawn for each budget by itself 14 of validations."""
    grown = [best_size(drawn(seed), resamples=60).exponent for seed in range(30)]
    assert sum(one.low <= 0.5 <= one.high for one in grown) >= 24


def test_budgets_without_a_best_size_are_refused():
    with pytest.raises(FitError, match=r"budget 1e\+12: a parabola needs at least 3 sizes, got 2"):
        parabola(1e12, [(1, 3, "a"), (2, 2, "b"), (2, 2, "c")])
    for odd in ((0, 3, "a"), (-1, 3, "a"), (10, np.nan, "a"), (np.inf, 3, "a")):  # an axis may have a value of 0
        with pytest.raises(FitError, match=r"^budget 1e\+12: sizes must be positive, and sizes and losses finite$"):
            parabola(1e12, [odd, (1, 2, "b"), (100, 2.5, "c")])
    with pytest.raises(FitError, match="no minimum among the sizes 1 to 100"):
        parabola(1e12, one_seed([3, 2, 1]))
    with pytest.raises(FitError, match="no minimum"):
        parabola(1e12, one_seed([2, 3, 2]))
    with pytest.raises(FitError, match="at least 2 budgets with a minimum, got 1"):
        best_size(valleys(0, 0)[:1])
    exact = [parabola(10.0**power, one_seed([2, 1, 2])) for power in (12, 13)]
    with pytest.raises(FitError, match=r"budget 1e\+12: run 0 alone decides a part of the fit, .*; add seeds"):
        best_size(exact)
    # the middle size has two seeds, but the others decide their sides of the parabola alone
    with pytest.raises(FitError, match="alone decides a part of the fit"):
        best_size(valleys(0.005, 0, seeds=(1, 0, 2, 0, 1)))
    points = list(zip([1, 1, 10, 10, 100, 100], [2, 3, 2.4, 2.5, 3, 2.02], "abcdef", strict=True))
    with pytest.raises(FitError, match="resampled curves have no minimum"):
        best_size([parabola(budget, points) for budget in (1e12, 1e13)])


# --- curves ---


def test_tokens_that_a_loss_takes():
    curve = {100.0: 4.0, 1000.0: 3.0, 10000.0: 2.5}
    assert tokens_to(3.5, curve) == pytest.approx(100 * 10**0.5), "half way along log tokens"
    assert tokens_to(3.0, curve) == pytest.approx(1000)
    assert tokens_to(4.5, curve) == 100, "at most"
    assert tokens_to(2.4, curve) is None
    assert tokens_to(3.0, {}) is None
    assert tokens_to(3.0, {1.0: 4, 2.0: 2.9, 4.0: 3.1, 8.0: 2}) < 2, "the first time"


def test_the_loss_at_some_tokens():
    curve = {1000.0: 3.0, 100.0: 4.0}
    assert loss_at(100 * 10**0.5, curve) == pytest.approx(3.5)
    assert loss_at(1000, curve) == 3
    assert (loss_at(99, curve), loss_at(1001, curve), loss_at(1, {})) == (None, None, None)
