"""Tokens of real runs: what is logged, saved and budgeted is the number of labels, whatever the layout."""

import itertools
import json

import pytest
import yaml

from checkpoints.folder import checkpoints_in
from megamem.config.load import parse_config
from megamem.config.run import RunConfig
from megamem.data.batch import IGNORED
from megamem.runs.result import read_result
from megamem.training.checks import open_feeder
from tests.integration.commands import LENGTH, run_tree
from tests.integration.ranks import Job
from tests.integration.resume_cases import train_each
from tests.unit.data_helpers import make_shards

pytestmark = pytest.mark.distributed

STEPS, ROWS = 6, 4


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Documents that fill some of their rows, none of them in whole chunks."""
    root = tmp_path_factory.mktemp("counting")
    make_shards(root, (40, 130, 25, 60, 90, 75), name="train")
    make_shards(root, (60,), name="validation", seed=100)
    return root


def tree(corpus, folder, name, **sections):
    training = {"batch_tokens": ROWS * LENGTH, **({"steps": STEPS} | sections.pop("training", {}))}
    return run_tree(
        corpus, folder, name=name, training=training, data={"documents": "pad", "validation": []},
        logging={"every": 1}, checkpoint={"every": 3, "keep_last": 9}, **sections,
    )  # fmt: skip


def feeder_of(settings):
    return open_feeder(parse_config(RunConfig, settings, "test"), dp_rank=0, dp_size=1)


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory):
    """One process, two data-parallel ranks, halves, and a budget of four epochs."""
    folder = tmp_path_factory.mktemp("runs")
    report = feeder_of(tree(corpus, folder, "report")).reports[0]
    budget = {"steps": None, "tokens": ROWS * report.predicted_tokens}
    single = {
        "one": tree(corpus, folder, "one"),
        "halves": tree(corpus, folder, "halves", training={"stop_after": STEPS // 2}),
        "budget": tree(corpus, folder, "budget", training=budget),
    }
    with Job(folder / "first", 1, train_each, single) as job:
        job.results()
    two = tree(corpus, folder, "two", training={"micro_batch_size": 1})
    with Job(folder / "second", 2, train_each, {"two": two}) as job:
        job.results()
    again = {"halves": tree(corpus, folder, "halves"), "budget": single["budget"]}
    with Job(folder / "third", 1, train_each, again) as job:
        job.results()
    return folder, report


def labels(settings, steps):
    """Labels of all steps up to each, counted in the batches."""
    feeder = feeder_of(settings)
    counts = [
        sum(int((feeder.batch(step, index).labels != IGNORED).sum()) for index in range(feeder.accumulation_steps))
        for step in range(steps)
    ]
    return list(itertools.accumulate(counts))


def logged(folder, name):
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def test_tokens_are_labels(runs, corpus):
    folder, _ = runs
    expected = labels(tree(corpus, folder, "one"), STEPS)
    lines = logged(folder, "one")
    assert [line["tokens"] for line in lines] == expected
    each = [after - before for before, after in zip([0, *expected], expected, strict=False)]
    assert [line["padding"] for line in lines] == [1 - count / (ROWS * LENGTH) for count in each]
    assert min(line["padding"] for line in lines) > 0.1, "otherwise this would show nothing"
    assert read_result(folder / "one").tokens == expected[-1]


@pytest.mark.parametrize("name", ["two", "halves"])
def test_another_layout_and_a_resumed_run_count_the_same(runs, name):
    folder, _ = runs
    one, other = logged(folder, "one"), logged(folder, name)
    assert [(line["step"], line["tokens"], line["padding"]) for line in other] == [
        (line["step"], line["tokens"], line["padding"]) for line in one
    ]
    assert read_result(folder / name).tokens == read_result(folder / "one").tokens
    saved, ours = ([c.run()["tokens"] for c in checkpoints_in(folder / n / "checkpoints")] for n in (name, "one"))
    assert saved == ours == [one[STEPS // 2 - 1]["tokens"], one[-1]["tokens"]]


def test_a_budget_is_spent_in_labels(runs):
    """Four epochs of rows are as many steps of four rows as an epoch has rows, and exactly the budget."""
    folder, report = runs
    result = read_result(folder / "budget")
    assert (result.steps, result.tokens) == (report.samples, ROWS * report.predicted_tokens)
    config = yaml.safe_load((folder / "budget" / "config.yaml").read_text())
    assert (config["training"]["steps"], config["training"]["tokens"]) == (result.steps, result.tokens)
    assert not list((folder / "budget").glob("config-before-*")), "started again, it found the same steps"
    assert json.loads((folder / "budget" / "heartbeat.json").read_text())["steps"] == result.steps
