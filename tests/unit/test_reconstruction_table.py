"""The reconstruction table of the paper's appendix, by the command that the documentation gives."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SEEDS = 32


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    output = tmp_path_factory.mktemp("runs") / "nested" / "reconstruction.json"
    command = [sys.executable, "-m", "benchmarks.reconstruction", "--seeds", str(SEEDS), "--output", output]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert output.with_suffix(".png").stat().st_size > 10_000
    return done.stdout, json.loads(output.read_text())


@pytest.fixture(scope="module")
def rows(report):
    return {(row["signal"], row["order"], row["rule"]): row for row in report[1]["rows"]}


@pytest.mark.parametrize(("order", "paper"), [(32, 0.97), (128, 0.90), (512, 0.72)])
def test_noise_is_reconstructed_as_well_as_in_the_paper(rows, order, paper):
    row = rows["random noise", order, "ZOH"]
    assert row["paper"] == paper
    # The paper prints two digits, so its figure stands for anything up to half a digit more.
    assert row["expected_edge"] <= paper + 0.005
    # The mean over the seeds strays from its expectation by the spread of one seed over sqrt(seeds).
    assert row["edge"] == pytest.approx(row["expected_edge"], abs=4 * row["spread"] / math.sqrt(SEEDS))
    assert row["middle"] < row["edge"]


@pytest.mark.parametrize("count", [1, 3, 5])
def test_sine_waves_at_the_edge_err_by_half_a_sample(rows, count):
    """Reading half a sample early costs (f' / 2T)^2 on average: (pi w)^2 / 2T^2 for each unit sine wave."""
    row = rows[f"{count} sine wave{'s' * (count > 1)}", 32, "ZOH"]
    theory = sum((math.pi * frequency / 1024) ** 2 / 2 for frequency in range(1, count + 1))
    assert row["edge"] == pytest.approx(theory, rel=0.02)
    assert row["edge"] < row["paper"]
    assert row["middle"] < 1e-3 * row["edge"]


def test_the_rules_rank_as_in_the_paper(rows):
    """At t = k: bilinear, ZOH, backward, forward, from best to worst."""
    five = {rule: rows["5 sine waves", 32, rule]["edge"] for _, _, rule in rows if "t = k + 1" not in rule}
    assert sorted(five, key=five.__getitem__) == [
        "bilinear, t = k",
        "ZOH",
        "backward, t = k",
        "forward, t = k",
    ]
    assert rows["5 sine waves", 32, "ZOH"]["middle"] < 1e-3 * five["bilinear, t = k"]


def test_the_table_is_printed_and_recorded(report):
    printed, record = report
    assert (record["length"], record["seeds"]) == (1024, SEEDS)
    lines = [line for line in printed.splitlines() if line.startswith("| ")]
    assert len(lines) == 1 + len(record["rows"]) == 13
    assert all(line.count("|") == 8 for line in lines)
