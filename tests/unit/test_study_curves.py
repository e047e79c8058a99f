"""Curves of a study's runs: losses over training tokens and over compute."""

from __future__ import annotations

import pytest

from megamem.config.load import parse_config
from megamem.config.run import RunConfig
from megamem.study.collect import Record, mean_training_flops, training_figures
from megamem.study.config import LawConfig
from megamem.study.curves import POINTS, curve_plots, thinned
from megamem.study.grid import planned_runs
from megamem.study.laws.fit import FitError
from megamem.study.laws.points import loss_curves
from megamem.study.plots import plotly_figure
from megamem.training.phases import training_flops
from tests.finished_study import RUN, finished_study


@pytest.fixture
def study(tmp_path):
    return finished_study(tmp_path)


def test_curves_are_colored_by_any_axis(study):
    runs = planned_runs(study)
    training, validation, compute = curve_plots(study, runs)
    # each run's tokens by what one of them costs
    for by_tokens, by_flops, run in zip(validation.series, compute.series, runs, strict=True):
        cost = mean_training_flops(run.config)
        assert by_flops.x == pytest.approx([cost * tokens for tokens in by_tokens.x])
        assert by_flops.y == by_tokens.y
    assert (len(training.series), validation.by) == (16, ("size", "memory", "seed"))
    (menu,) = plotly_figure(validation)["layout"]["updatemenus"]
    assert [button["label"] for button in menu["buttons"]] == ["by size", "by memory", "by seed"]
    (change,) = menu["buttons"][1]["args"]
    assert change["name"] == ["none", "none", "elastic", "elastic"] * 4
    assert change["showlegend"] == [True, False, True] + [False] * 13


def test_two_evaluations_are_no_curve():
    rows = [
        Record("a", {"seed": "0", "evaluation": name}, {"training_tokens": 4096.0, "val_loss": 3.0})
        for name in ("trained", "uniform")
    ]
    law = LawConfig(name="law", title="Law", kind="tokens_to_loss", per="memory", axis="size", points="final")
    assert loss_curves(law, rows[:1]) == {"0": {4096.0: 3.0}}
    with pytest.raises(
        FitError, match="two figures after 4,096 tokens, of the evaluations trained and uniform; choose"
    ):
        loss_curves(law, rows)


def test_flops_follow_the_phases_of_a_run():
    """Of sequences of two lengths, the longer ones at the end and a quarter of all positions padding."""
    training = {**RUN["training"], "phases": [{"from_step": 16, "sequence_length": 64}]}
    tree = {**RUN, "model": {**RUN["model"], "mixer": "full_attention"}, "training": training}
    config = parse_config(RunConfig, tree, "run")
    short, long = training_flops(config)
    assert long > 1.01 * short
    flops = lambda tokens, *end: training_figures(config, tokens, *end)["training_flops"]  # noqa: E731
    assert flops(512) == pytest.approx(512 * short)
    assert flops(2048) == pytest.approx(1024 * short + 1024 * long)
    assert flops(3072, 3072) == pytest.approx(0.75 * (1024 * short + 3072 * long))
    assert flops(768, 3072) == pytest.approx(768 * short), "the first phase ends with its positions"
    assert mean_training_flops(config) == pytest.approx((1024 * short + 3072 * long) / 4096)


def test_long_curves_are_thinned():
    points = thinned({float(i): float(i) for i in range(10_000)})
    assert len(points) == POINTS
    assert [next(iter(points)), list(points)[-1]] == [0, 9999]
