"""Files of tensors on a disk: what is read is what was written, the mode is the umask's, a full disk is one line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from small_disk import SmallDisk
from test_checkpoint_read import write

from checkpoints.read import merge_weights
from checkpoints.target import target
from checkpoints.weights import write_weights
from megamem.errors import CheckpointError, ConversionError
from megamem.hf.export import write_shards
from megamem.hf.folder import whole_folder
from megamem.memory.continuous import matrix_cache
from megamem.tensor_files import write_tensors
from tests.saved_run import saved_run

MANY = {
    "a": torch.arange(5).bfloat16(),
    "b": torch.zeros(0, 3),
    "c": torch.eye(3).double().t()[:, :2],
    "d": torch.ones(()),
}


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_tensors(path, MANY, {"said": "ä"})
    found = load_file(path)
    assert found.keys() == MANY.keys()
    assert all(torch.equal(found[key], value) and found[key].dtype == value.dtype for key, value in MANY.items())
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"said": "ä"}
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.fixture(params=[0o022, 0o002, 0o077], ids=oct)
def mode(request: pytest.FixtureRequest) -> Iterator[int]:
    """The mode that files are to have under the umask of this test."""
    before = os.umask(request.param)
    yield 0o666 & ~request.param
    os.umask(before)


def modes(folder: Path) -> set[int]:
    return {path.stat().st_mode & 0o777 for path in folder.rglob("*.safetensors")}


def test_files_have_the_mode_that_the_umask_asks_for(
    tmp_path: Path, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = torch.ones(3)
    for step in (1, 2):
        saved = target(tmp_path / "rank" / f"step-{step}")
        saved.prepare()
        saved.write_tensors("rank-00000.safetensors", {"value@0": value})
    assert modes(tmp_path / "rank") == {mode}
    (tmp_path / "weights").mkdir()
    write_weights({"value": value}, tmp_path / "weights" / "model.safetensors")
    assert modes(tmp_path / "weights") == {mode}
    (tmp_path / "hf").mkdir()
    write_shards(tmp_path / "hf", iter([("one", value), ("two", value)]), 12)
    assert modes(tmp_path / "hf") == {mode}
    monkeypatch.setenv("MEGAMEM_CACHE", str(tmp_path / "cache"))
    matrix_cache.cached("ones", lambda: [value])
    assert modes(tmp_path / "cache") == {mode}


def test_weights_are_on_the_disk_before_they_have_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        done.append("sync")
        fsync(descriptor)

    def renamed(path: Path, to: Path) -> Path:
        done.append("rename")
        return replace(path, to)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    write_weights({"value": torch.ones(3)}, tmp_path / "model.safetensors")
    assert done == ["sync", "rename", "sync"], "the file, and its folder after it"


def test_a_full_disk_is_one_line_and_leaves_what_was_there(tmp_path: Path, small_disk: SmallDisk) -> None:
    checkpoint = write(tmp_path, {"master/value": torch.zeros(200_000)})
    (checkpoint.path / "run.json").write_text(json.dumps(saved_run(4)))
    small_disk.fill()
    path = small_disk.folder / "weights.safetensors"
    with pytest.raises(CheckpointError) as caught:
        merge_weights(checkpoint, path)
    said = str(caught.value)
    assert said.startswith(f"{path}: cannot be written (No space left on device: 800,000 bytes needed, ")
    assert said.endswith(" bytes free)")
    assert "\n" not in said
    assert [entry.name for entry in small_disk.folder.iterdir() if entry.name != ".filler"] == []


def test_conversions_leave_what_others_called_partial_alone(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "notes.txt").write_text("mine")
    with whole_folder(tmp_path / "out") as first:
        (first / "a").write_text("first")
        with whole_folder(tmp_path / "other") as second:
            (second / "a").write_text("second")
    assert (tmp_path / "out.partial" / "notes.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "out", "out.partial"]
    late = whole_folder(tmp_path / "late")
    late.__enter__()
    (tmp_path / "late").mkdir()
    (tmp_path / "late" / "b").write_text("theirs")
    with pytest.raises(ConversionError, match="late: exists already"):
        late.__exit__(None, None, None)
    assert [path.name for path in (tmp_path / "late").iterdir()] == ["b"]


def test_a_conversion_on_a_full_disk_is_one_line(small_disk: SmallDisk) -> None:
    small_disk.fill()
    out = small_disk.folder / "out"
    with (
        pytest.raises(ConversionError, match=r"cannot be written \(No space left on device") as caught,
        whole_folder(out) as partial,
    ):
        write_shards(partial, iter([("one", torch.zeros(200_000))]), 10**9)
    assert "\n" not in str(caught.value)
    assert [path.name for path in small_disk.folder.iterdir() if path.name != ".filler"] == []
