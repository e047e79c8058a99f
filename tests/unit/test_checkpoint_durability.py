"""What a power failure or a kill leaves of a checkpoint: nothing, or all of it. The calls are recorded in order."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from checkpoints.folder import MARKER, checkpoints_in, folder_name
from checkpoints.location import remove_folder
from checkpoints.resume import choose_checkpoint
from checkpoints.retention import prune, remove_unfinished
from checkpoints.target import target
from megamem.config.checkpoint import CheckpointConfig
from megamem.files import sync, write_json
from tests.unit.test_checkpoint_folder import write


@pytest.fixture
def calls(monkeypatch):
    """`sync NAME`, `rename NAME` and `write NAME` (of text, which does not force itself to the disk), in order."""
    made = []
    fsync, rename, replace, write_text = os.fsync, Path.rename, Path.replace, Path.write_text

    def recorded(what, path):
        made.append(f"{what} {Path(path).name}")

    def synced(descriptor):
        recorded("sync", os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    for name, function in (("rename", rename), ("replace", replace)):
        monkeypatch.setattr(Path, name, lambda path, to, f=function: (recorded("rename", to), f(path, to))[1])
    monkeypatch.setattr(
        Path, "write_text", lambda path, *args, **kw: (recorded("write", path), write_text(path, *args, **kw))[1]
    )
    return made


def test_all_is_on_the_disk_before_the_name_and_the_name_before_the_save_ends(tmp_path, calls):
    into = target(tmp_path / "checkpoints" / folder_name(20))
    into.prepare()
    into.write_tensors("rank-00000.safetensors", {"master/a@0": torch.ones(3)})
    into.write_text("index.json", "{}")
    into.write_text("run.json", "{}")
    files = into.written()
    assert {"sync rank-00000.safetensors", "sync index.json", "sync run.json"} <= set(calls), "before others go on"
    calls.clear()
    into.complete(files)
    partial = f"{folder_name(20)}.partial"
    assert calls == [
        "write manifest.json", "sync manifest.json", f"write {MARKER}", f"sync {MARKER}", f"sync {partial}",
        f"rename {folder_name(20)}", "sync checkpoints",
    ]  # fmt: skip


def test_a_file_that_is_written_whole_is_on_the_disk_before_it_has_its_name(tmp_path, calls):
    write_json(tmp_path / "result.json", {"loss": 2.5})
    (temporary,) = {call.removeprefix("sync ") for call in calls if call.startswith("sync")}
    assert calls == [f"sync {temporary}", "rename result.json"]
    assert temporary != "result.json"


def test_folders_can_be_forced_to_the_disk(tmp_path, calls):
    sync(tmp_path)
    assert calls == [f"sync {tmp_path.name}"]


class TestAKilledRemoval:
    """What is half removed is no checkpoint: readers would take it for a whole one, of which files are missing."""

    @pytest.fixture(autouse=True)
    def killed(self, monkeypatch):
        def dies(path):
            (Path(path) / "rank-00000.safetensors").unlink()
            raise OSError(5, "killed")

        monkeypatch.setattr(shutil, "rmtree", dies)

    def test_of_a_checkpoint_that_is_not_kept(self, tmp_path):
        for step in (10, 20):
            write(tmp_path, step)
        assert list(prune(tmp_path, last=1).failed) == [tmp_path / folder_name(10)]
        assert [(c.step, c.complete) for c in checkpoints_in(tmp_path)] == [(10, False), (20, True)]

    def test_leaves_nothing_to_resume_from(self, tmp_path):
        for step in (10, 20):
            write(tmp_path, step)
        with pytest.raises(OSError, match="killed"):
            remove_folder(tmp_path / folder_name(20), MARKER)
        chosen, skipped = choose_checkpoint(CheckpointConfig(), tmp_path)
        assert (chosen.step, skipped) == (10, [])

    def test_of_an_unfinished_one(self, tmp_path):
        """Its marker may be there: a kill between marker and rename."""
        partial = write(tmp_path, 10).path.rename(tmp_path / f"{folder_name(10)}.partial")
        assert list(remove_unfinished(tmp_path)) == [partial]
        assert not (partial / MARKER).exists()
