"""Padding: how much of it a run expects, what it says about it, and the steps that a budget of tokens takes."""

import math
from fractions import Fraction

import numpy as np
import pytest
import yaml

from megamem.config.budget import steps_for
from megamem.config.load import parse_config
from megamem.config.run import RunConfig
from megamem.data.batch import IGNORED
from megamem.errors import ConfigError
from megamem.planning.arithmetic import describe
from megamem.training.checks import open_feeder, padding_warnings, with_steps
from tests.unit.data_helpers import make_shards

LENGTH, ROWS = 64, 4
SHORT, EVEN, LONG = (8, 9, 10, 9), (60, 55, 70, 66), (900, 1100)
"""Words of documents: most of each row is padding, some of it, hardly any of it."""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("padding")
    for name, sizes in (("short", SHORT), ("even", EVEN), ("long", LONG)):
        make_shards(root, sizes, name=name)
    return root


def config(root, *sources, steps=None, tokens=None, **data):
    paths = [{"path": str(root / path), "weight": weight} for path, weight in sources]
    tree = {
        "name": "case",
        "model": {"layers": 1, "hidden_size": 8, "heads": 2, "vocab_size": 300, "chunk_size": 16},
        "data": {"sources": paths, "sequence_length": LENGTH, "documents": "pad", **data},
        "training": {"steps": steps, "tokens": tokens, "batch_tokens": ROWS * LENGTH},
    }
    return parse_config(RunConfig, tree, "test")


def feeder_of(settings):
    return open_feeder(settings, dp_rank=0, dp_size=1)


def labels_of(feeder, steps):
    """Labels of each step, counted in its batches."""
    return [
        sum(int((feeder.batch(step, i).labels != IGNORED).sum()) for i in range(feeder.accumulation_steps))
        for step in range(steps)
    ]


@pytest.mark.parametrize("documents", ["pad", "pack", "drop", "join"])
@pytest.mark.parametrize("feeding", ["sequences", "streams"])
def test_padding_of_batches_is_what_has_no_label(root, feeding, documents):
    if feeding == "streams" and documents in ("pack", "drop"):
        return
    feeder = feeder_of(config(root, ("even", 1), steps=1, documents=documents, feeding=feeding))
    for step in range(20):
        for index in range(feeder.accumulation_steps):
            batch = feeder.batch(step, index)
            assert batch.positions - batch.padding == int((batch.labels != IGNORED).sum())
            assert documents in ("pad", "pack") or batch.padding == 0


def test_the_expected_share_is_that_of_an_epoch(root):
    feeder = feeder_of(config(root, ("even", 1), steps=1))
    rows = feeder.reports[0].samples
    # ROWS rows a step: `rows` steps are ROWS epochs
    padded = 1 - Fraction(sum(labels_of(feeder, rows)), rows * ROWS * LENGTH)
    assert feeder.padding == padded
    assert 0 < padded < Fraction(1, 2)


@pytest.mark.parametrize("feeding", ["sequences", "streams"])
def test_sources_count_by_their_shares(root, feeding):
    """Of 4 lanes one reads `long`; of 1,024 samples a quarter."""
    feeder = feeder_of(config(root, ("even", 3), ("long", 1), steps=1, feeding=feeding))
    even, long = (report.padding_share for report in feeder.reports)
    assert feeder.padding == (3 * even + long) / 4
    assert even > long


def test_a_tasks_positions_without_label_are_no_padding(root, tmp_path):
    task = {"kind": "mqar", "vocab_size": 300, "length": 64, "pairs": 4, "examples": 10}
    (tmp_path / "task.yaml").write_text(yaml.safe_dump(task))
    feeder = feeder_of(config(tmp_path, ("task.yaml", 1), steps=1, documents="drop"))
    batch = feeder.batch(0)
    assert (feeder.padding, batch.padding) == (0, 0)
    assert int((batch.labels != IGNORED).sum()) == 4, "one label for each pair"


class TestBudget:
    @pytest.mark.parametrize(
        ("tokens", "padding", "steps"),
        [(100, Fraction(0), 1), (101, Fraction(0), 2), (100, Fraction(1, 2), 2), (300, Fraction(1, 3), 5)],
    )
    def test_steps_by_hand(self, tokens, padding, steps):
        """Steps of 100 positions. 300 tokens at two thirds are 4.5 steps."""
        assert steps_for(tokens, 100, padding) == steps

    def test_no_rounding_error_adds_a_step(self):
        """1/3 has no exact float: 2e15 tokens of 3e15 positions, two thirds of which count, are one step."""
        assert steps_for(2 * 10**15, 3 * 10**15, Fraction(1, 3)) == 1

    def test_the_budget_is_reached_within_its_last_step(self, root):
        feeder = feeder_of(config(root, ("even", 1), steps=1))
        epoch = feeder.reports[0].predicted_tokens
        settings = config(root, ("even", 1), tokens=ROWS * epoch)
        resolved = with_steps(settings, [feeder])
        assert resolved.training.tokens == ROWS * epoch
        assert resolved.steps == resolved.training.steps == feeder.reports[0].samples
        assert sum(labels_of(feeder, resolved.steps)) == ROWS * epoch
        more = with_steps(config(root, ("even", 1), tokens=ROWS * epoch + 1), [feeder])
        assert more.steps == resolved.steps + 1
        assert settings.steps == math.ceil(ROWS * epoch / (ROWS * LENGTH)), "without data: as if nothing was padded"

    def test_it_is_resolved_once(self, root):
        settings = config(root, ("even", 1), tokens=5000)
        feeder = feeder_of(settings)
        resolved = with_steps(settings, [feeder])
        again = parse_config(RunConfig, resolved.model_dump(mode="json"), "config.yaml of a run folder")
        assert with_steps(again, [feeder]) == resolved

    @pytest.mark.parametrize(
        ("sections", "said"),
        [
            ({"checkpoint": {"keep_steps": [0]}}, "checkpoint.keep_steps: {0} is beyond the {1} steps of the run"),
            ({"logging": {"profile_steps": [1, 0]}}, "logging.profile_steps [1, {0}] must be a first and a last step"),
            ({"logging": {"record_step": 0}, "parallel": {"pp": 2}}, "logging.record_step {0} is beyond the {1} steps"),
            (
                {"optimizer": {"warmup_steps": 0}},
                "optimizer: {0} steps of warm-up and 0 of decay are more than the {1} of the run",
            ),
        ],
        ids=str,
    )
    def test_steps_that_padding_adds_are_steps_of_the_run(self, root, sections, said):
        """The last step of a padded budget may be named, the one after it may not: known once data is open."""
        settings = config(root, ("even", 1), tokens=5000)
        feeder = feeder_of(settings)
        steps = with_steps(settings, [feeder]).steps
        assert steps > settings.steps, "the data is padded"

        def naming(step):
            tree = settings.model_dump(mode="json")
            for section, values in sections.items():
                ((key, value),) = values.items()
                value = [part or step for part in value] if isinstance(value, list) else value or step
                tree[section][key] = value
            # two layers, for two stages
            tree["model"]["layers"] = 2
            return parse_config(RunConfig, tree, "file")

        assert with_steps(naming(steps), [feeder]).steps == steps
        with pytest.raises(ConfigError) as caught:
            with_steps(naming(steps + 1), [feeder])
        assert str(caught.value).startswith(said.format(steps + 1, steps))

    def test_steps_stay(self, root):
        settings = config(root, ("even", 1), steps=7)
        assert with_steps(settings, [feeder_of(settings)]) is settings

    def test_both_must_agree(self, root):
        feeder = feeder_of(config(root, ("even", 1), steps=1))
        wanted = with_steps(config(root, ("even", 1), tokens=5000), [feeder]).steps
        with pytest.raises(
            ConfigError, match=rf"steps {wanted + 1} and tokens 5,000 do not agree.* take {wanted} steps"
        ):
            with_steps(config(root, ("even", 1), steps=wanted + 1, tokens=5000), [feeder])


class TestWords:
    def test_little_is_not_mentioned(self, root):
        assert padding_warnings([feeder_of(config(root, ("long", 1), steps=1))]) == []

    def test_much_is_a_warning(self, root):
        feeder = feeder_of(config(root, ("even", 1), ("long", 1), steps=1))
        (line,) = padding_warnings([feeder])
        share = float(feeder.reports[0].padding_share)
        assert line == (
            f"warning: data: {float(feeder.padding):.0%} of all positions are padding ({share:.0%} of those of "
            f"{root / 'even'}); join documents (data.documents: join)"
        )

    def test_most_is_refused_unless_allowed(self, root):
        with pytest.raises(ConfigError) as refused:
            feeder_of(config(root, ("long", 1), ("short", 3), steps=1))
        line = str(refused.value)
        assert line.startswith("data: ")
        assert f"of those of {root / 'short'}); join documents (data.documents: join), or set" in line
        assert "data.allow_padding: true" in line
        assert "\n" not in line
        allowed = feeder_of(config(root, ("long", 1), ("short", 3), steps=1, allow_padding=True))
        assert allowed.padding > Fraction(1, 2)
        assert len(padding_warnings([allowed])) == 1

    def test_the_budget_is_stated_with_its_padding(self, root):
        settings = config(root, ("even", 1), tokens=5000)
        feeder = feeder_of(settings)
        resolved = with_steps(settings, [feeder])
        (line,) = [line for line in describe(resolved, 1, [feeder.padding]) if line.startswith("budget")]
        tokens = round(resolved.steps * ROWS * LENGTH * (1 - feeder.padding))
        share = float(np.float64(feeder.padding))
        assert line == f"budget: {resolved.steps} steps = {tokens:,} tokens and {share:.1%} padding"
        (line,) = [line for line in describe(settings, 1) if line.startswith("budget")]
        assert (
            line == f"budget: {settings.steps} steps = {settings.steps * ROWS * LENGTH:,} tokens if nothing is padded"
        )
