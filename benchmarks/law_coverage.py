"""How often the intervals of scaling laws hold the constants of the law that losses were drawn from.

python -m benchmarks.law_coverage            # a minute for each line and 40 draws, on one core
"""

from __future__ import annotations

import argparse
from itertools import product

import numpy as np

from megamem.study.laws import Array, Law, fit_law

CHINCHILLA = Law(1.69, (406.4, 410.7), (0.34, 0.28))
MEMORY = Law(2.5, (3.0,), (0.5,))
NOISE, SHARED = 0.003, 0.004
"""Standard deviations of log L: of each point, and of what a run's points share."""
RESAMPLES = 60


def cases() -> list[tuple[str, Law, Array, Array | None, float]]:
    """(name, law, x [points, variables], run of each point, shared deviation)."""
    sizes, tokens = np.geomspace(5e7, 1e10, 6), np.geomspace(1e9, 3e11, 6)
    runs = np.repeat(np.arange(8), 7)
    curves = np.column_stack([np.repeat(np.geomspace(5e7, 1e10, 4), 14), np.tile(np.geomspace(1e9, 3e11, 7), 8)])
    return [
        ("one variable, 14 points", MEMORY, np.repeat(np.geomspace(1, 64, 7), 2)[:, None], None, 0),
        ("one variable, 10 points", MEMORY, np.repeat(np.geomspace(1, 64, 5), 2)[:, None], None, 0),
        ("two variables, 36 points", CHINCHILLA, np.array(list(product(sizes, tokens))), None, 0),
        ("8 runs of 7 validations", CHINCHILLA, curves, runs, 0),
        ("8 runs that err as a whole", CHINCHILLA, curves, runs, SHARED),
    ]


def main() -> None:
    """Print the share of draws whose interval holds each constant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=40)
    draws = parser.parse_args().draws
    for name, law, x, runs, shared in cases():
        names = ("floor", *(f"exponent of {i}" for i in range(x.shape[1])))
        truth = dict(zip(names, (law.floor, *law.exponents), strict=True))
        held = dict.fromkeys(truth, 0)
        for draw in range(draws):
            generator = np.random.default_rng(1000 + draw)
            deviation = generator.normal(0, NOISE, len(x))
            if runs is not None and shared:
                deviation += generator.normal(0, shared, 8)[runs]
            losses = law(x) * np.exp(deviation)
            found = fit_law(x, losses, [str(i) for i in range(x.shape[1])], runs, RESAMPLES).estimates
            for constant, value in truth.items():
                held[constant] += found[constant].low <= value <= found[constant].high
        shares = ", ".join(f"{constant} {count / draws:.0%}" for constant, count in held.items())
        print(f"{name}: {shares}", flush=True)


if __name__ == "__main__":
    main()
