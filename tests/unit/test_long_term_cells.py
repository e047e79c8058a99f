"""Where past tokens lie in a continuous long-term memory: against loops, and against the signal itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megamem.evaluation.long_term_memory.cells import (
    Cells,
    equal_samples,
    first_cells,
    later_cells,
    sticky_samples,
    voronoi,
)
from megamem.memory.continuous.gaussian_basis import Basis, Padding, Regression, expected_basis, operators
from megamem.memory.continuous.long_term_memory import Places

TOKENS, SAMPLES, TAU = 6, 15, 0.7
EXACT = 1e-14
"""float64, a handful of operations on numbers below 1."""


def regression_of(padding: Padding = "none", **sizes: int) -> Regression:
    given = {"tokens": TOKENS, "samples": SAMPLES, **sizes}
    return Regression(Basis(12, (0.03, 0.1)), 0.5, given["tokens"], given["samples"], TAU, padding)


def slow_cells(places: list[float]) -> list[float]:
    """The borders of cells, from the distance to each place."""
    borders = [0.0]
    for left, right in zip(places, places[1:], strict=False):
        borders.append(left + (right - left) / 2)
    return [*borders, 1.0]


def slow_later(regression: Regression, old: list[float], samples: list[float], possible: list[float]) -> list[float]:
    """New borders, stretch by stretch: each is spread over the cells of the samples that were read in it."""
    count = regression.samples
    kept = [TAU * (m + 1) / count for m in range(count)]
    new = [TAU + (1 - TAU) * (j + 1) / regression.tokens for j in range(regression.tokens)]
    ends = slow_cells(kept + new)
    nearest = [min(range(len(possible)), key=lambda k: abs(possible[k] - place)) for place in samples]
    stretches = slow_cells(possible)
    moved = []
    for border in old:
        stretch = 0
        while stretch < len(possible) - 1 and border > stretches[stretch + 1]:
            stretch += 1
        before = sum(k < stretch for k in nearest)
        inside = sum(k == stretch for k in nearest)
        share = (border - stretches[stretch]) / (stretches[stretch + 1] - stretches[stretch])
        moved.append(ends[before] + share * (ends[before + inside] - ends[before]))
    return moved + ends[count + 1 :]


@pytest.mark.parametrize("padding", ["none", "zeros"])
@pytest.mark.parametrize("at", [None, 0.0, 0.5, 1.0])
def test_cells_after_five_updates_equal_a_loop(padding: Padding, at: float | None) -> None:
    """at: where in its bin a sticky sample lies; None: samples at equal distances."""
    regression, generator = regression_of(padding), np.random.default_rng(3)
    cells = first_cells(regression, 12)
    slow = slow_cells(regression.first_places()[0].tolist())
    assert cells.borders == pytest.approx(slow, abs=EXACT)
    for _ in range(5):
        if at is None:
            samples = equal_samples(regression)
            read = possible = [(m + 1) / SAMPLES for m in range(SAMPLES)]
        else:
            possible = [(bin_ + at) / 8 for bin_ in range(8)]
            read = sorted(float(possible[bin_]) for bin_ in generator.choice([1, 2, 2, 2, 5, 7], SAMPLES))
            # samples of the model are float32
            stored = np.array(read, dtype=np.float32).astype(np.float64)
            samples = sticky_samples(Places("random", 8, at, 0), stored)
        slow = slow_later(regression, slow, read, possible)
        cells = later_cells(regression, cells, samples)
        assert cells.borders == pytest.approx(slow, abs=EXACT)
    assert (cells.first, cells.end) == (12, 12 + 6 * TOKENS)
    assert (np.diff(cells.borders) >= 0).all()
    assert (cells.borders[0], cells.borders[-1]) == (0, 1)


def test_samples_at_equal_distances_contract_by_tau() -> None:
    """Each border p becomes tau p, but in the last stretch, which ends in the middle to the first new place."""
    regression = regression_of()
    old = first_cells(regression, 0)
    new = later_cells(regression, old, equal_samples(regression))
    inside = old.borders <= 1 - 0.5 / SAMPLES
    assert new.borders[: TOKENS + 1][inside] == pytest.approx(TAU * old.borders[inside], abs=EXACT)
    assert new.border_before(TOKENS) == pytest.approx(TAU + (1 - TAU) / TOKENS / 2, abs=EXACT)


def test_what_is_never_read_is_gone_and_what_is_always_read_has_all() -> None:
    regression = regression_of(tokens=8)
    old = first_cells(regression, 0)
    read = np.full(SAMPLES, 2.5 / 4)  # the third quarter alone
    spaces = np.diff(later_cells(regression, old, sticky_samples(Places("spread", 4, 0.5, 0), read)).borders)
    quarter = np.array(
        [max(0.0, min(b, 0.75) - max(a, 0.5)) for a, b in zip(old.borders, old.borders[1:], strict=False)]
    )
    assert spaces[:8] == pytest.approx(quarter / 0.25 * (TAU + (1 - TAU) / 16), abs=EXACT)
    assert (spaces[:3] == 0).all()


def test_cells_are_what_lies_nearest() -> None:
    places = np.array([0.1, 0.4, 0.5, 0.97])
    borders = voronoi(places)
    for point in np.linspace(0.001, 0.999, 500):
        nearest = int(np.abs(places - point).argmin())
        assert borders[nearest] - EXACT <= point <= borders[nearest + 1] + EXACT


@pytest.mark.parametrize("sticky", [False, True])
def test_a_cell_is_where_the_signal_is_of_its_token(sticky: bool) -> None:
    """The signal is linear in the vectors, so that the part of it that each token has made is known exactly.

    Four chunks of 64 tokens, the shape of the language models. The center of a token's part, a mean over its square,
    lies in the token's cell or nearer to it than a wide function is wide (largest distance 0.031; without sticky
    memories 0.003). The space of 8 neighbours is their part of the whole signal (largest difference 0.0095 of 0.091;
    without sticky memories 0.0004).
    """
    basis, bins = Basis(128, (0.01, 0.05)), 128
    regression = Regression(basis, 0.5, 64, 128, TAU, "none")
    matrices = operators(regression, torch.float64, torch.device("cpu"))
    cells, coefficients = first_cells(regression, 0), matrices.first
    generator = np.random.default_rng(0)
    for _ in range(3):
        read, samples = np.arange(1, 129) / 128, equal_samples(regression)
        if sticky:
            shares = generator.dirichlet(np.full(bins, 2.0))
            read = (np.sort(generator.choice(bins, 128, p=shares)) + 0.5) / bins
            samples = sticky_samples(Places("random", bins, 0.5, 0), read)
        cells = later_cells(regression, cells, samples)
        places = torch.from_numpy(read)
        bumps = expected_basis(places, torch.zeros_like(places), matrices.centers, matrices.variances)
        coefficients = torch.cat((matrices.old @ bumps @ coefficients, matrices.new), dim=1)
    grid = torch.linspace(0, 1, 4_000, dtype=torch.float64)
    parts = basis.values(grid) @ coefficients  # [points, tokens]
    centers = ((grid @ parts.square()) / parts.square().sum(0)).numpy()
    low, high = cells.borders[:-1], cells.borders[1:]
    assert (np.maximum(low - centers, centers - high) < (0.05 if sticky else 0.01)).all()
    shares = parts.mean(0).numpy().reshape(-1, 8).sum(1)
    assert (np.abs(shares - (high - low).reshape(-1, 8).sum(1)) < (0.02 if sticky else 0.002)).all()


def test_cells_know_their_tokens() -> None:
    cells = Cells(5, np.array([0.0, 0.2, 1.0]))
    assert cells.end == 7
    assert cells.border_before(6) == 0.2
