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
    check_run_folder(config.run_folder, 1000)
    assert contents(tmp_path) == []


def test_an_empty_folder_is_accepted(config):
    config.run_folder.mkdir(parents=True)
    check_run_folder(config.run_folder, 1000)
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
    folder = create_run_folder(config)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(RunFolderError, match="already holds a run; choose another `name` or remove the folder"):
        check_run_folder(folder, 1000)
    with pytest.raises(RunFolderError, match="already holds a run"):  # a run that was faster than the check
        create_run_folder(config)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_file_in_its_place(config):
    config.runs_folder.mkdir(parents=True)
    config.run_folder.write_text("x")
    with pytest.raises(RunFolderError, match="is a file, not a folder"):
        check_run_folder(config.run_folder, 1000)


def test_a_file_above_it(config):
    config.runs_folder.parent.mkdir(parents=True)
    config.runs_folder.write_text("x")
    with pytest.raises(RunFolderError, match="cannot be written"):
        check_run_folder(config.run_folder, 1000)


def test_a_folder_that_cannot_be_written(config, monkeypatch):
    def denied(self, *_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.touch", denied)
    with pytest.raises(RunFolderError, match=r"cannot be written \(Permission denied\); choose another `runs_folder`"):
        check_run_folder(config.run_folder, 1000)


def test_a_full_disk(config, monkeypatch):
    Usage = namedtuple("Usage", "total used free")
    needed = 5 * 2**20
    asked = []

    def usage(path):
        asked.append(os.fspath(path))
        return Usage(0, 0, free)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    free = FREE_BYTES + needed
    check_run_folder(config.run_folder, needed)
    free -= 2**20
    with pytest.raises(RunFolderError, match="68 MiB free, but the run needs about 69 MiB") as caught:
        check_run_folder(config.run_folder, needed)
    assert "\n" not in str(caught.value)
    assert all(os.path.isdir(path) for path in asked)
