"""How often the intervals of scaling laws hold the constants of the law that losses were drawn from.

python -m benchmarks.law_coverage            # up to a minute for each line and 40 draws, on one core
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import numpy as np

from megamem.study.laws.budgets import best_size, parabola
from megamem.study.laws.fit import Array, FitError, Law, fit_law

CHINCHILLA = Law(1.69, (406.4, 410.7), (0.34, 0.28))
MEMORY = Law(2.5, (3.0,), (0.5,))
NOISE, SHARED = 0.003, 0.004
"""Standard deviations of log L: of each point, and of what a run's points share."""
GROWTH, BUDGET_NOISE, BUDGET_SHARED = 0.5, 0.0005, 0.005
"""Exponent of the best size by budget; standard deviations of losses at budgets as above."""
RESAMPLES = 60

Held = dict[str, bool]
"""Whether the interval held it, by the constant's name."""
Draw = Callable[[np.random.Generator], Held]


def power(law: Law, x: Array, runs: Array | None, shared: float, generator: np.random.Generator) -> Held:
    """One draw of losses at x [points, variables]. runs: [points]; shared: deviation of whole runs."""
    deviation = generator.normal(0, NOISE, len(x))
    if runs is not None and shared:
        deviation += generator.normal(0, shared, 8)[runs]
    losses = law(x) * np.exp(deviation)
    found = fit_law(x, losses, [str(i) for i in range(x.shape[1])], runs, RESAMPLES).estimates
    truth = {"floor": law.floor, **{f"exponent of {i}": exponent for i, exponent in enumerate(law.exponents)}}
    return {name: found[name].low <= value <= found[name].high for name, value in truth.items()}


def growth(budgets: Sequence[float], runs: Sequence[tuple[float, str]], generator: np.random.Generator) -> Held:
    """One draw of losses at budgets, of all runs (size, name) whose size is near the best one."""
    shared, curves = {name: generator.normal(0, BUDGET_SHARED) for _, name in runs}, []
    for budget in budgets:
        away = {(size, name): np.log10(size) - GROWTH * np.log10(budget) for size, name in runs}
        points = [
            (size, 2 + 0.1 * off**2 + shared[name] + generator.normal(0, BUDGET_NOISE), name)
            for (size, name), off in away.items()
            if abs(off) < 1.1
        ]
        curves.append(parabola(budget, points))
    found = best_size(curves, RESAMPLES).exponent
    return {"exponent of the best size": found.low <= GROWTH <= found.high}


def power_laws() -> list[tuple[str, Draw]]:
    """Lines of sums of powers."""
    sizes, tokens = np.geomspace(5e7, 1e10, 6), np.geomspace(1e9, 3e11, 6)
    runs = np.repeat(np.arange(8), 7)
    curves = np.column_stack([np.repeat(np.geomspace(5e7, 1e10, 4), 14), np.tile(np.geomspace(1e9, 3e11, 7), 8)])
    memories = {14: np.repeat(np.geomspace(1, 64, 7), 2)[:, None], 10: np.repeat(np.geomspace(1, 64, 5), 2)[:, None]}
    return [
        *((f"one variable, {count} points", partial(power, MEMORY, x, None, 0)) for count, x in memories.items()),
        ("two variables, 36 points", partial(power, CHINCHILLA, np.array(list(product(sizes, tokens))), None, 0)),
        ("8 runs of 7 validations", partial(power, CHINCHILLA, curves, runs, 0)),
        ("8 runs that err as a whole", partial(power, CHINCHILLA, curves, runs, SHARED)),
    ]


def best_sizes() -> list[tuple[str, Draw]]:
    """Lines of best sizes: runs of one budget each, and runs that give losses to several."""
    few = (1e12, 1e17, 1e22)  # so far apart that each run is near one best size only
    lines = []
    for factors, seeds in (((0.1, 0.3, 1, 3, 10), 2), ((0.1, 0.3, 1, 3, 10), 1), ((0.1, 0.5, 2, 10), 1)):
        runs = [(b**0.5 * f, f"{b}-{f}-{seed}") for b in few for f in factors for seed in range(seeds)]
        lines.append((f"{len(factors)} sizes of {seeds} seeds at each of 3 budgets", partial(growth, few, runs)))
    sizes = np.geomspace(1e5, 1e9, 9)
    for count, seeds in ((3, 1), (9, 1), (3, 2), (9, 2)):
        budgets = [float(budget) for budget in np.geomspace(1e12, 1e16, count)]
        runs = [(float(size), f"{size}-{seed}") for size in sizes for seed in range(seeds)]
        lines.append(
            (f"{len(runs)} runs ({seeds} seeds), validations at {count} budgets", partial(growth, budgets, runs))
        )
    return lines


def main() -> None:
    """Print the share of draws whose interval holds each constant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=40)
    draws = parser.parse_args().draws
    for name, draw in [*power_laws(), *best_sizes()]:
        found: list[Held] = []
        for number in range(draws):
            try:
                found.append(draw(np.random.default_rng(1000 + number)))
            except FitError:
                continue
        shares = [f"{constant} {sum(held[constant] for held in found) / len(found):.0%}" for constant in found[0]]
        print(f"{name}: {', '.join(shares)}; {draws - len(found)} of {draws} refused", flush=True)


if __name__ == "__main__":
    main()
