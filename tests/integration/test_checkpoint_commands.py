"""`megamem checkpoint ...` and `megamem verify-resume` on a real run; saves that fail."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from checkpoints.folder import checkpoints_in, open_checkpoint
from checkpoints.verify import verify
from megamem.cli.main import app
from megamem.errors import CheckpointError
from tests.integration.commands import finish, megamem, run_tree, write_config
from tests.integration.ranks import Job, command

pytestmark = pytest.mark.distributed

SECTIONS = {
    "parallel": {"tp": 2},
    "training": {"steps": 6},
    "checkpoint": {"every": 2, "keep_last": 9},
    "evaluation": {"every": 2},
    "logging": {"every": 1},
}


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    """A finished run with checkpoints after steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("commands")
    config = write_config(folder / "run.yaml", run_tree(data, folder / "runs", **SECTIONS))
    with Job(folder / "job", 2, command, "train", str(config)) as job:
        assert job.codes(90) == [0, 0], job.output(0)
    return folder / "runs" / "run"


def checkpoint(*arguments):
    """(exit code, stdout, error)."""
    result = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit | CheckpointError), result.exception
    return result.exit_code, result.stdout, result.exception


class TestCommands:
    def test_ls(self, run):
        code, out, _ = checkpoint("ls", run, "--json")
        rows = json.loads(out)
        assert (code, [row["step"] for row in rows]) == (0, [2, 4, 6])
        assert all(row["complete"] and row["bytes"] > 0 for row in rows)
        assert [row["tokens"] for row in rows] == [1024, 2048, 3072]
        assert rows[0]["layout"] == {"pp": 1, "dp": 1, "tp": 2}
        assert all(row["val_loss"] is not None for row in rows), "validated every second step, the last one too"
        assert "PP 1 x DP 1 x TP 2" in checkpoint("ls", run)[1]

    def test_show(self, run):
        _, out, _ = checkpoint("show", run, "--json")
        shown = json.loads(out)
        assert (shown["step"], shown["optimizer_steps"], shown["samples"]) == (6, 6, 24)
        assert shown["tensors"]["master/embedding.weight"] == {"shape": [320, 32], "dtype": "float32"}
        assert {name.split("/")[0] for name in shown["tensors"]} == {"master", "exp_avg", "exp_avg_sq", "rng"}
        assert "master/embedding.weight" in checkpoint("show", run / "checkpoints" / "step-00000002")[1]

    def test_verify(self, run, tmp_path):
        code, out, _ = checkpoint("verify", run, "--json")
        assert code == 0
        assert [row["intact"] for row in json.loads(out)] == [True] * 3
        broken = copy(run, tmp_path) / "checkpoints" / "step-00000004"
        (broken / "rank-00001.safetensors").unlink()
        code, out, error = checkpoint("verify", tmp_path / "run")
        assert code
        assert "rank-00001.safetensors: is missing" in out
        assert str(error) == "1 of 3 checkpoint(s) cannot be used"
        assert isinstance(checkpoint("verify", broken)[2], CheckpointError)

    def test_diff(self, run):
        folder = run / "checkpoints"
        code, out, _ = checkpoint("diff", folder / "step-00000006", run, "--json")
        assert (code, json.loads(out)["bitwise_equal"]) == (0, True)
        code, out, _ = checkpoint("diff", folder / "step-00000002", folder / "step-00000004", "--json", "--limit", 3)
        found = json.loads(out)
        assert (code, found["bitwise_equal"], len(found["differences"])) == (1, False, 3)
        assert "values differ, by" in found["differences"][0]

    def test_merge(self, run, tmp_path):
        out = tmp_path / "weights.safetensors"
        assert checkpoint("merge", run, "-o", out)[0] == 0
        ours, theirs = load_file(out), load_file(run / "model.safetensors")
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        assert "exists already" in str(checkpoint("merge", run, "-o", out)[2])

    def test_prune(self, run, tmp_path):
        copy(run, tmp_path)
        code, out, _ = checkpoint("prune", tmp_path / "run", "--keep-last", 1, "--keep-best", 2, "--json")
        assert code == 0
        assert len(json.loads(out)["removed"]) == 1
        assert [c.step for c in checkpoints_in(tmp_path / "run" / "checkpoints")] == [4, 6], "the loss falls"

    @pytest.mark.parametrize("verb", ["ls", "show", "verify"])
    def test_nothing_there(self, tmp_path, verb):
        said = str(checkpoint(verb, tmp_path / "nowhere")[2])
        assert str(tmp_path / "nowhere") in said
        assert "\n" not in said


def losses(run):
    """Of each logged step."""
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if "loss" in record]


def copy(run, folder):
    return shutil.copytree(run, folder / "run")


@pytest.mark.parametrize("layout", [{"tp": 1, "pp": 2}, {"tp": 2, "zero_stage": 3}], ids=["pp2", "tp2-zero3"])
def test_a_new_run_starts_from_weights(data, run, tmp_path, layout):
    """Its first loss is what these weights give, under another layout; moments and counters are its own."""
    sections = {**SECTIONS, "training": {"steps": 1, "init_from": str(run / "model.safetensors")}, "parallel": layout}
    config = write_config(tmp_path / "run.yaml", run_tree(data, tmp_path / "runs", name="new", **sections))
    with Job(tmp_path / "job", 2, command, "train", str(config)) as job:
        assert job.codes(90) == [0, 0], job.output(0)
    (first,), before = losses(tmp_path / "runs" / "new"), losses(run)
    assert first < before[0] - 0.2, "it does not begin at the beginning"
    assert open_checkpoint(tmp_path / "runs" / "new" / "checkpoints" / "step-00000001").run()["optimizer_steps"] == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: {k: v for k, v in w.items() if k != "norm.weight"}, "norm.weight is missing"),
        (lambda w: {**w, "extra": torch.ones(1)}, "extra is not in the model"),
        (lambda w: {**w, "norm.weight": torch.ones(3)}, r"norm.weight has shape [3], the model's is [32]"),
    ],
    ids=["missing", "extra", "shape"],
)
def test_weights_of_another_model_are_refused(data, run, tmp_path, change, said):
    save_file(change(load_file(run / "model.safetensors")), tmp_path / "w.safetensors")
    training = {"steps": 1, "init_from": str(tmp_path / "w.safetensors")}
    sections = {**SECTIONS, "training": training, "parallel": {"tp": 1}}
    config = write_config(tmp_path / "run.yaml", run_tree(data, tmp_path / "runs", name="new", **sections))
    # before other processes start
    with Job(tmp_path / "job", 1, command, "train", str(config)) as job:
        assert job.codes(90) == [CheckpointError.exit_code]
        assert f"{tmp_path / 'w.safetensors'}: {said}" in job.output(0)
        assert job.output(0).count("\n") == 1


def test_start_from_wants_a_file(run):
    result = CliRunner().invoke(app, ["start-from", str(run / "gone"), "run.yaml"])
    assert "megamem checkpoint merge makes one" in str(result.exception)


@pytest.mark.slow
def test_verify_resume(data, tmp_path):
    config = write_config(tmp_path / "run.yaml", run_tree(data, tmp_path / "runs"))
    code, out, err = finish(megamem("verify-resume", str(config), "--steps", "4", "--json"))
    assert code == 0, err
    found = json.loads(out)
    assert found["bitwise_equal"] is True
    assert found["tensors_compared"] > 3 * 20
    assert list((tmp_path / "runs").iterdir()) == [], "nothing is left behind"


def disk_full_in_the_second_save(*arguments: str) -> None:
    """On a rank: the command; rank 1 finds no space when it writes for the second time."""
    from checkpoints import target

    save, count = target.write_tensors, 0

    def failing(path, tensors):
        nonlocal count
        count += 1
        if count == 2 and os.environ["RANK"] == "1":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        save(path, tensors)

    target.write_tensors = failing
    command(*arguments)


def test_a_save_that_fails_ends_the_run_and_leaves_the_one_before(data, tmp_path):
    config = write_config(tmp_path / "run.yaml", run_tree(data, tmp_path / "runs", **SECTIONS))
    with Job(tmp_path / "job", 2, disk_full_in_the_second_save, "train", str(config)) as job:
        codes = job.codes(90)
        said = job.output(0)
    assert codes == [CheckpointError.exit_code] * 2, said
    assert said.startswith("megamem: checkpoint after step 4: rank 1: ")
    assert "No space left on device" in said
    assert said.count("\n") == 1
    folder = tmp_path / "runs" / "run" / "checkpoints"
    (left,) = [c for c in checkpoints_in(folder) if c.complete]
    assert left.step == 2
    verify(left)


def test_a_folder_that_cannot_be_written(data, tmp_path):
    config = write_config(tmp_path / "run.yaml", run_tree(data, tmp_path / "runs", **SECTIONS))
    (tmp_path / "runs" / "run").mkdir(parents=True)
    (tmp_path / "runs" / "run" / "checkpoints").write_text("in the way")
    with Job(tmp_path / "job", 2, command, "train", str(config)) as job:
        assert job.codes(90) == [CheckpointError.exit_code] * 2
        said = job.output(0)
    assert "checkpoints" in said
    assert said.count("\n") == 1


def test_sigterm_saves_and_the_same_command_goes_on(data, tmp_path):
    """Preempted in the middle, started again: the end is that of a run nobody disturbed."""
    steps = {**SECTIONS, "training": {"steps": 30}, "checkpoint": {"every": 0}, "evaluation": {"every": 0}}
    config = write_config(tmp_path / "run.yaml", run_tree(data, tmp_path / "runs", **steps))
    with Job(tmp_path / "first", 2, command, "train", str(config)) as job:
        job.wait_for(r"step +5/")
        job.send(0, signal.SIGTERM)
        assert job.codes(60) == [75, 75]
    folder = tmp_path / "runs" / "run" / "checkpoints"
    (saved,) = checkpoints_in(folder)
    assert 5 <= saved.step < 30
    with Job(tmp_path / "second", 2, command, "train", str(config)) as job:
        assert job.codes(90) == [0, 0], job.output(0)
        assert f"goes on from {saved.path}" in job.output(0, "out").replace("\n", "")
    verify(open_checkpoint(folder / "step-00000030"))


def test_the_clock_asks_for_checkpoints(data, tmp_path):
    # 60 nanoseconds: less than passes between a save and the next look at the clock
    minutes = {**SECTIONS, "checkpoint": {"every": 0, "minutes": 1e-9, "keep_last": 9}, "evaluation": {"every": 0}}
    config = write_config(tmp_path / "run.yaml", run_tree(data, tmp_path / "runs", **minutes))
    with Job(tmp_path / "job", 2, command, "train", str(config)) as job:
        assert job.codes(90) == [0, 0], job.output(0)
    steps = [c.step for c in checkpoints_in(tmp_path / "runs" / "run" / "checkpoints")]
    assert steps == [2, 3, 4, 5, 6], "the ranks agree after one step, and save with the next"
