"""Branches of a stable run are the separate runs of their lengths, bit for bit; what cannot branch is told why."""

from __future__ import annotations

import json
import shutil

import pytest
import yaml
from typer.testing import CliRunner

from checkpoints.folder import checkpoints_in, open_checkpoint
from checkpoints.read import compare
from checkpoints.retention import prune
from megamem.cli.main import app
from megamem.config.load import load_config
from megamem.config.run import RunConfig
from megamem.errors import CheckpointError, ConfigError, MegamemError, RunFolderError
from tests.integration.commands import run_tree, write_config
from tests.integration.ranks import Job
from tests.integration.resume_cases import train_each

pytestmark = pytest.mark.distributed

LENGTHS = {5: 4, 8: 6}
"""Length of a branch: the step at which it leaves the run of 10 steps, which decays after step 8."""


def wsd(data, runs, name, **sections):
    training = {"steps": 10, **sections.pop("training", {})}
    optimizer = {"schedule": "wsd", "warmup_steps": 2, "decay_steps": 2, **sections.pop("optimizer", {})}
    return run_tree(
        data, runs, name=name, training=training, optimizer=optimizer, evaluation={"every": 0}, logging={"every": 1},
        checkpoint={"every": 0, "keep_last": 1, "keep_steps": [4, 6, 8], **sections.pop("checkpoint", {})}, **sections,
    )  # fmt: skip


def train_all(folder, trees):
    with Job(folder, 1, train_each, trees) as job:
        job.results()


def branch(*arguments):
    """(printed, error)."""
    result = CliRunner().invoke(app, ["branch", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, MegamemError), result.exception
    return result.stdout, result.exception


def figures(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in ("step", "tokens", "loss", "grad_norm", "lr")} for line in lines]


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """`stable` with a branch for each length, and a separate run for each."""
    folder = tmp_path_factory.mktemp("branches")
    runs = folder / "runs"
    train_all(folder / "first", {"stable": wsd(data, runs, "stable")})
    before = {path: path.read_bytes() for path in sorted((runs / "stable").rglob("*")) if path.is_file()}
    trees = {}
    for length, at in LENGTHS.items():
        out, error = branch(runs / "stable", "--at", at, "--steps", length)
        assert error is None
        assert out.splitlines()[-1] == f"megamem train {runs / f'stable-{length}' / 'config.yaml'}"
        # what the stable run keeps of it no longer matters
        trees[f"stable-{length}"] = yaml.safe_load((runs / f"stable-{length}" / "config.yaml").read_text())
        own = {"steps": length}
        optimizer = {"decay_steps": length - at}
        trees[f"separate-{length}"] = wsd(
            data, runs, f"separate-{length}", training=own, optimizer=optimizer, checkpoint={"keep_steps": []}
        )
    train_all(folder / "second", trees)
    after = {path: path.read_bytes() for path in sorted((runs / "stable").rglob("*")) if path.is_file()}
    assert after == before, "a run is only read by its branches"
    return runs


@pytest.mark.parametrize("length", LENGTHS)
def test_a_branch_is_the_separate_run_bit_for_bit(runs, length):
    made, separate = runs / f"stable-{length}", runs / f"separate-{length}"
    assert figures(made) == figures(separate)[LENGTHS[length] :]
    last = f"checkpoints/step-{length:08d}"
    count, differences = compare(open_checkpoint(made / last), open_checkpoint(separate / last))
    assert count > 0
    assert [str(difference) for difference in differences] == []
    held_out = [json.loads((run / "evaluation.json").read_text())["val_loss"] for run in (made, separate)]
    assert held_out[0] == held_out[1]


def test_its_configuration_is_complete_and_names_its_origin(runs):
    config = load_config(RunConfig, runs / "stable-8" / "config.yaml")
    assert config.origin is not None
    assert (config.origin.run, config.origin.step) == (runs / "stable", 6)
    assert (config.steps, config.optimizer.warmup(8), config.optimizer.decay(8)) == (8, 2, 2)
    assert config.checkpoint.resume == "auto"
    assert [c.step for c in checkpoints_in(runs / "stable-8" / "checkpoints")] == [8], "its start was only linked"


def test_branch_points_are_saved_and_kept(runs):
    """Though `every` is 0 and `keep_last` 1: the run's own end is the newest."""
    assert [c.step for c in checkpoints_in(runs / "stable" / "checkpoints")] == [4, 6, 8, 10]


def test_without_a_length_the_decay_is_its_usual_share(runs, tmp_path):
    shutil.copytree(runs / "stable", tmp_path / "stable")
    branch(tmp_path / "stable", "--at", 8, "--name", "usual", "evaluation.every=3")
    config = load_config(RunConfig, tmp_path / "usual" / "config.yaml")
    assert (config.steps, config.optimizer.decay_steps, config.evaluation.every) == (10, 2, 3)
    branch(tmp_path / "stable", "--at", 4, "--tokens", 6 * 512, "--name", "budget")
    assert load_config(RunConfig, tmp_path / "budget" / "config.yaml").steps == 6
    # the branch's start is its own, whatever becomes of the checkpoint it was made of
    prune(tmp_path / "stable" / "checkpoints", last=1)
    assert [c.step for c in checkpoints_in(tmp_path / "usual" / "checkpoints")] == [8]


def test_phases_that_a_branch_reaches_are_its_own_too(runs, tmp_path):
    shutil.copytree(runs / "stable", tmp_path / "stable")
    path = tmp_path / "stable" / "config.yaml"
    tree = yaml.safe_load(path.read_text())
    tree["training"]["phases"] = [{"from_step": step, "batch_tokens": 1024 * step} for step in (6, 7, 9)]
    write_config(path, tree)
    branch(tmp_path / "stable", "--at", 6, "--steps", 8, "--name", "phased")
    config = load_config(RunConfig, tmp_path / "phased" / "config.yaml")
    assert [phase.from_step for phase in config.training.phases] == [6, 7]


REFUSALS = {
    "no checkpoint": (
        ["--at", 5, "--steps", 8], CheckpointError,
        "no checkpoint of step 5; there are those of steps 4, 6, 8, 10 (checkpoint.keep_steps saves and keeps)",
    ),
    "in the decay": (["--at", 10], ConfigError, "step 10 is not in its stable part, which lies between steps 2 and 8"),
    "in the warm-up": (["--at", 1], ConfigError, "step 1 is not in its stable part"),
    "too short": (["--at", 6, "--steps", 6], ConfigError, "would end after step 6 already; give it more than 6 steps"),
    "twice": (["--at", 6, "--steps", 8], RunFolderError, "stable-8: exists already; give the branch another --name"),
    "another batch": (
        ["--at", 6, "--steps", 9, "training.batch_tokens=1024"], CheckpointError,
        "batch_tokens was 512 and is 1024; a run cannot go on with another",
    ),
    "another model": (
        ["--at", 6, "--steps", 9, "model.norm_eps=0.1"], CheckpointError, "model.norm_eps was ",
    ),
    "other data": (["--at", 6, "--steps", 9, "data.seed=5"], CheckpointError, "data_fingerprint was "),
    "another beginning": (
        ["--at", 6, "--steps", 9, "training.init_from=other.safetensors"], CheckpointError,
        "the run did not start from training.init_from other.safetensors",
    ),
    "a phase that has begun otherwise": (
        ["--at", 6, "--steps", 9, "training.phases=[{from_step: 3, batch_tokens: 1024}]"], CheckpointError,
        "phases.after_step_3 was None and is ",
    ),
    "no decay": (
        ["--at", 6, "--steps", 9, "optimizer.schedule=cosine"], ConfigError,
        "optimizer.schedule is cosine, which has no stable part to branch off; train with wsd",
    ),
    "a decay that has begun": (
        ["--at", 6, "--steps", 9, "optimizer.decay_steps=5"], ConfigError,
        "step 6 is not in its stable part, which lies between steps 2 and 4",
    ),
    "in a store": (
        ["--at", 6, "--steps", 9, "checkpoint.retry_minutes=0", "checkpoint.folder=memory://branches"], CheckpointError,
        "leave checkpoint.folder as it was",
    ),
    "two lengths": (["--at", 6, "--steps", 8, "--tokens", 9], ConfigError, "give either --steps or --tokens"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(runs, case):
    arguments, kind, said = REFUSALS[case]
    before = sorted(runs.iterdir())
    _, error = branch(runs / "stable", *arguments)
    assert isinstance(error, kind)
    assert said in str(error)
    assert "\n" not in str(error)
    assert sorted(runs.iterdir()) == before


def test_a_cosine_has_no_stable_part(data, runs, tmp_path):
    tree = wsd(data, tmp_path, "cosine", optimizer={"schedule": "cosine"})
    (tmp_path / "cosine").mkdir()
    write_config(tmp_path / "cosine" / "config.yaml", tree)
    _, error = branch(tmp_path / "cosine", "--at", 4)
    assert isinstance(error, ConfigError)
    assert "optimizer.schedule is cosine, which has no stable part to branch off; train with wsd" in str(error)


def test_a_branch_without_its_start_does_not_begin_anew(runs, tmp_path):
    shutil.copytree(runs / "stable", tmp_path / "stable")
    branch(tmp_path / "stable", "--at", 4, "--steps", 6, "--name", "lost")
    shutil.rmtree(tmp_path / "lost" / "checkpoints")
    tree = yaml.safe_load((tmp_path / "lost" / "config.yaml").read_text())
    with Job(tmp_path / "job", 1, train_each, {"lost": tree}) as job, pytest.raises(AssertionError) as caught:
        job.results()
    assert "it has no checkpoint to begin with; make it again with megamem branch" in str(caught.value)
