"""The run folder: refused before anything is written, made once, with what is needed to repeat the run."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megamem.config.load import config_hash, load_config, parse_config
from megamem.config.run import RunConfig
from megamem.errors import CheckpointError, RunFolderError
from megamem.runs.folder import FREE_BYTES, RESTARTS, RunLock, check_run_folder, create_run_folder
from megamem.training.checkpointing import check_folder_everywhere
from tests.saved_run import saved_run


@pytest.fixture
def config(tmp_path):
    tree = {
        "name": "case",
        "runs_folder": str(tmp_path / "deep" / "runs"),
        "model": {"layers": 1, "hidden_size": 8, "heads": 2, "vocab_size": 16, "chunk_size": 4},
        "data": {"sources": "none", "sequence_length": 8},
        "training": {"steps": 1, "batch_tokens": 8},
    }
    return parse_config(RunConfig, tree, "test")


def contents(folder):
    return sorted(path.relative_to(folder) for path in folder.rglob("*"))


def test_a_folder_that_can_be_made_is_accepted_and_nothing_is_written(tmp_path, config):
    check_run_folder(config, 1000)
    assert contents(tmp_path) == []


def test_an_empty_folder_is_accepted(config):
    config.run_folder.mkdir(parents=True)
    check_run_folder(config, 1000)
    assert contents(config.run_folder) == []


def with_checkpoints_in(config, folder):
    return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"folder": str(folder)})})


def test_a_folder_of_checkpoints_that_cannot_be_written_is_named_before_the_run(tmp_path, config):
    """Where nothing can be made, and a file in the folder's place; one that can be made is not made yet."""
    (tmp_path / "file").write_text("x")
    for folder, reason in (("/proc/x", "No such file or directory"), (tmp_path / "file", "Not a directory")):
        with pytest.raises(CheckpointError) as caught:
            check_run_folder(with_checkpoints_in(config, folder), 1000)
        expected = f"checkpoint.folder {folder}/case: checkpoints cannot be kept there ({reason})"
        assert str(caught.value) == expected
    check_run_folder(with_checkpoints_in(config, tmp_path / "a" / "b"), 1000)
    assert [str(path) for path in contents(tmp_path)] == ["file"]


def test_every_rank_tries_the_folder_of_checkpoints(monkeypatch, config):
    """The one that cannot write to it may be on another node than the command."""
    monkeypatch.setattr(dist, "all_gather_object", lambda errors, mine, group: errors.__setitem__(2, mine))
    group = SimpleNamespace(rank=lambda: 2, size=lambda: 3)
    check_folder_everywhere(config, group)
    with pytest.raises(CheckpointError, match=r"^rank 2 on .*: checkpoint\.folder /proc/x/case: checkpoints cannot be"):
        check_folder_everywhere(with_checkpoints_in(config, "/proc/x"), group)


def test_what_is_needed_to_repeat_the_run_is_written(config):
    folder = create_run_folder(config)
    assert load_config(RunConfig, folder / "config.yaml") == config
    assert config_hash(config) in (folder / "config.yaml").read_text()
    environment = json.loads((folder / "environment.json").read_text())
    assert {"torch", "deepspeed", "megatron-core", "megamem"} <= environment["packages"].keys()
    assert environment["command"]
    assert environment["python"]


def test_another_run_is_refused_and_left_alone(config):
    folder = create_run_folder(config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"lr": 1.0})}))
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(RunFolderError, match="already holds another run, without a checkpoint to go on from"):
        check_run_folder(config, 1000)
    with pytest.raises(RunFolderError, match="already holds another run"):  # a run that was faster than the check
        create_run_folder(config)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_the_same_run_may_begin_again_until_it_has_ended(config):
    """A job that was killed before its first checkpoint is started by the same command."""
    folder = create_run_folder(config)
    check_run_folder(config, 1000)
    create_run_folder(config)
    (folder / "model.safetensors").touch()
    with pytest.raises(RunFolderError, match="already holds another run"):
        check_run_folder(config, 1000)


def test_no_run_begins_again_where_none_is_to_be_resumed(config):
    config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"resume": "none"})})
    create_run_folder(config)
    with pytest.raises(RunFolderError, match="already holds another run; choose another `name`"):
        check_run_folder(config, 1000)


def test_a_run_with_checkpoints_goes_on_and_keeps_its_earlier_configuration(config):
    folder = create_run_folder(config)
    before = (folder / "config.yaml").read_text()
    (folder / "checkpoints" / "step-00000001").mkdir(parents=True)
    changed = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"lr": 1.0})})
    check_run_folder(changed, 1000)
    create_run_folder(changed)
    assert load_config(RunConfig, folder / "config.yaml") == changed
    assert (folder / "config-before-1.yaml").read_text() == before


def test_a_file_in_its_place(config):
    config.runs_folder.mkdir(parents=True)
    config.run_folder.write_text("x")
    with pytest.raises(RunFolderError, match="is a file, not a folder"):
        check_run_folder(config, 1000)


def test_a_file_above_it(config):
    config.runs_folder.parent.mkdir(parents=True)
    config.runs_folder.write_text("x")
    with pytest.raises(RunFolderError, match="cannot be written"):
        check_run_folder(config, 1000)


def test_a_folder_that_cannot_be_written(config, monkeypatch):
    def denied(self, *_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.touch", denied)
    with pytest.raises(RunFolderError, match=r"cannot be written \(Permission denied\); choose another `runs_folder`"):
        check_run_folder(config, 1000)


def test_a_full_disk(config, monkeypatch):
    Usage = namedtuple("Usage", "total used free")
    needed = 5 * 2**20
    at_once = config.checkpoint.keep_last + 1  # one is written before the oldest is removed
    asked = []

    def usage(path):
        asked.append(os.fspath(path))
        return Usage(0, 0, free)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    free = FREE_BYTES + at_once * needed
    check_run_folder(config, needed)
    free -= 2**20
    with pytest.raises(RunFolderError, match="78 MiB free, but the run needs about 79 MiB") as caught:
        check_run_folder(config, needed)
    for step in (1, 2):  # checkpoints of the run that goes on take up their share already
        (config.run_folder / "checkpoints" / f"step-0000000{step}").mkdir(parents=True)
    free = FREE_BYTES + needed
    check_run_folder(config, needed)
    assert "\n" not in str(caught.value)
    assert all(os.path.isdir(path) for path in asked)


def test_two_jobs_do_not_write_one_folder(config):
    create_run_folder(config)
    said = rf"is being written by another job \(process {os.getpid()} on .+\); wait for its end or choose another"
    with RunLock(config.run_folder) as held:
        held.take()
        with pytest.raises(RunFolderError, match=said):
            RunLock(config.run_folder).take()
        with pytest.raises(RunFolderError, match=said):
            check_run_folder(config, 1000)
    check_run_folder(config, 1000)


@pytest.mark.parametrize("count", RESTARTS)
def test_a_job_that_is_started_again_waits_for_the_lock_of_a_lost_host(config, monkeypatch, count):
    monkeypatch.setenv(count, "1")
    create_run_folder(config)
    held = RunLock(config.run_folder)
    held.take()
    released = threading.Timer(0.7, held.__exit__)
    released.start()
    check_run_folder(config, 1000)
    released.join()
    with RunLock(config.run_folder) as held:
        held.take()
        with pytest.raises(RunFolderError, match="is being written by another job"):
            RunLock(config.run_folder).take(0.1)


def test_a_killed_job_holds_nothing(config):
    code = (
        "import os; from pathlib import Path; from megamem.runs.folder import RunLock; "
        f"lock = RunLock(Path({str(config.run_folder)!r})); lock.take(); "
        "print('held', flush=True); os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (killed.stdout, killed.returncode) == ("held\n", -9)
    with RunLock(config.run_folder) as lock:
        lock.take()


def test_a_file_system_without_locks(config, monkeypatch):
    def unknown(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", unknown)
    with RunLock(config.run_folder) as lock:
        lock.take()


def branch(config, start, saved_start):
    """The run whose `checkpoint.resume` is `start`, in a folder with a checkpoint of one whose was `saved_start`."""
    checkpoint = config.run_folder / "checkpoints" / "step-00000004"
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMPLETE").touch()
    (checkpoint / "run.json").write_text(
        json.dumps(saved_run(4, config={"checkpoint": {"resume": saved_start}, "training": {"steps": 9}}))
    )
    (config.run_folder / "config.yaml").touch()
    return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"resume": start})})


def test_a_run_from_another_ones_checkpoint_goes_on_from_its_own(config):
    config = branch(config, "runs/a/checkpoints/step-00000002", "runs/a/checkpoints/step-00000002")
    check_run_folder(config, 1000)
    create_run_folder(config)


def test_a_run_from_another_checkpoint_is_another_run(config):
    config = branch(config, "runs/b/checkpoints/step-00000002", "runs/a/checkpoints/step-00000002")
    with pytest.raises(RunFolderError, match=r"already holds a run; checkpoint\.resume=auto goes on with it"):
        check_run_folder(config, 1000)


@pytest.mark.parametrize("unfinished", [False, True])
def test_a_run_from_a_checkpoint_begins_again_before_its_first_own_one(config, unfinished):
    """A job that lost a node early is started by the same command; another start is another run."""
    first, other = (
        config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"resume": start})})
        for start in ("runs/a/checkpoints/step-00000002", "runs/b/checkpoints/step-00000002")
    )
    folder = create_run_folder(first)
    if unfinished:
        (folder / "checkpoints" / "step-00000004").mkdir(parents=True)
    check_run_folder(first, 1000)
    create_run_folder(first)
    with pytest.raises(RunFolderError, match="already holds"):
        check_run_folder(other, 1000)
