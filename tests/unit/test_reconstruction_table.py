"""The reconstruction table of the paper's appendix, by the command that the documentation gives."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.reconstruction import LENGTH, PAPER, Row, markdown, noise_error, round_trip
from megamem.memory.continuous.hippo_rules import RULES, legs

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "mechanisms" / "elastic_memory.md"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    output = tmp_path_factory.mktemp("runs") / "nested" / "reconstruction.json"
    command = [sys.executable, "-m", "benchmarks.reconstruction", "--output", output]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert output.with_suffix(".png").stat().st_size > 10_000
    return done.stdout, json.loads(output.read_text())


@pytest.fixture(scope="module")
def rows(report):
    return {(row["signal"], row["order"], row["rule"]): row for row in report[1]["rows"]}


@pytest.mark.parametrize("which", list(PAPER), ids=str)
def test_the_first_token_at_time_1_gives_the_papers_digits(rows, which):
    printed = PAPER[which]
    form = ".1e" if "e" in printed else ".2f"
    assert f"{rows[which]['at_1']:{form}}" == printed
    # and time 0 does not, but for the smoothest readings of noise, where one token of 1,024 is nothing
    if which not in {("random noise", 32, "zoh"), ("random noise", 128, "zoh")}:
        assert f"{rows[which]['at_0']:{form}}" != printed


def test_all_rows_of_the_table_are_there(rows):
    """Typed from the paper once more, so that a slip in the benchmark's copy shows."""
    printed = {
        "1 sine wave": [(32, "zoh", 1.2e-5)],
        "3 sine waves": [(32, "zoh", 2.3e-4)],
        "5 sine waves": [
            (32, "zoh", 9.8e-4),
            (32, "forward", 3.3e-3),
            (32, "backward", 2.9e-3),
            (32, "bilinear", 4.8e-4),
        ],
        "random noise": [(32, "zoh", 0.97), (128, "zoh", 0.90), (512, "zoh", 0.72)],
    }
    assert {key: float(row["paper"]) for key, row in rows.items()} == {
        (name, order, rule): error for name, lines in printed.items() for order, rule, error in lines
    }


@pytest.mark.parametrize("rule", ["zoh", *RULES])
def test_the_round_trip_is_the_code_of_the_hippo_paper(rule):
    """c_t = Abar_t c_{t-1} + Bbar_t f_t from c = 0, A/t and B/t at t = 1 .. T, read at linspace(0, 1, T)."""
    A, B = legs(8)
    unit = torch.eye(LENGTH, dtype=torch.float64)
    state = torch.zeros(8, LENGTH, dtype=torch.float64)
    for t, token in enumerate(unit, start=1):
        if rule == "zoh":
            step = torch.linalg.matrix_exp(-A * math.log((t + 1) / t))
            drive = torch.linalg.solve_triangular(A, B - step @ B, upper=False)
            state = step @ state + drive * token
        else:
            state = RULES[rule](A / t, state, B / t * token)
    z = 2 * torch.linspace(0, 1, LENGTH, dtype=torch.float64) - 1
    legendre = [torch.special.legendre_polynomial_p(z, n) * math.sqrt(2 * n + 1) for n in range(8)]
    expected = torch.stack(legendre, dim=1) @ state
    torch.testing.assert_close(round_trip(8, rule, 1, "paper"), expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("count", [1, 3, 5])
def test_middles_are_far_more_accurate(rows, count):
    row = rows[f"{count} sine wave{'s' * (count > 1)}", 32, "zoh"]
    assert row["middles_at_0"] < 1e-3 * row["at_0"] < 1e-3 * row["at_1"]


def test_the_rules_rank_as_in_the_paper(rows):
    five = {rule: row["at_1"] for (name, _, rule), row in rows.items() if name == "5 sine waves"}
    assert sorted(five, key=five.__getitem__) == ["bilinear", "zoh", "backward", "forward"]
    assert rows["5 sine waves", 32, "zoh"]["middles_at_0"] < 1e-3 * five["bilinear"]


def test_expected_error_of_noise():
    trip = round_trip(32, "zoh", 1, "paper")
    draws = torch.randn(LENGTH, 2000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    errors = (trip @ draws - draws).square().mean(0)
    expected, spread = noise_error(trip)
    # means and deviations of 2,000 draws stray by 1/sqrt(2,000) = 2.2 % of the deviation
    assert errors.mean().item() == pytest.approx(expected, abs=4 * 0.022 * spread)
    assert errors.std().item() == pytest.approx(spread, rel=4 * 0.022)


def test_the_table_is_printed_recorded_and_on_the_page(report):
    printed, record = report
    assert record["length"] == 1024
    lines = [line for line in printed.splitlines() if line.startswith("|")]
    assert "\n".join(lines) == markdown([Row(**row) for row in record["rows"]])
    assert len(lines) == 2 + len(PAPER)
    page = PAGE.read_text().splitlines()
    assert [line for line in lines if line not in page] == []
