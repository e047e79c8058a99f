"""The run folder: refused before anything is written, made once, with what is needed to repeat the run."""

import json
import os
import shutil
from collections import namedtuple

import pytest

from megamem.config.load import config_hash, load_config, parse_config
from megamem.config.run import RunConfig
from megamem.errors import RunFolderError
from megamem.training.run_folder import FREE_BYTES, check_run_folder, create_run_folder


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
    asked = []

    def usage(path):
        asked.append(os.fspath(path))
        return Usage(0, 0, free)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    free = FREE_BYTES + needed
    check_run_folder(config, needed)
    free -= 2**20
    with pytest.raises(RunFolderError, match="68 MiB free, but the run needs about 69 MiB") as caught:
        check_run_folder(config, needed)
    assert "\n" not in str(caught.value)
    assert all(os.path.isdir(path) for path in asked)
