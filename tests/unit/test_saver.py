"""What a save that fails ends a run with, and what counts as progress while a run waits for one."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from checkpoints.saver import WAITING, Saver
from megamem.config.checkpoint import CheckpointConfig
from megamem.errors import CheckpointError, MegamemError

ALONE = SimpleNamespace(rank=lambda: 0, size=lambda: 1)


def test_a_lost_rank_is_no_reason_not_to_try_again(tmp_path, monkeypatch):
    def lost(*_, **__):
        raise RuntimeError("Connection closed by peer [127.0.0.1]:4711")

    monkeypatch.setattr(dist, "all_gather_object", lost)
    with pytest.raises(MegamemError, match="checkpoint after step 4: Connection closed by peer") as caught:
        Saver(tmp_path / "checkpoints", CheckpointConfig(), ALONE).save(4, {}, {}, wait=True)
    assert caught.type is MegamemError, "exit code 1, after which a launcher starts the run again"


def test_a_folder_that_cannot_be_written_is_one(tmp_path, monkeypatch):
    monkeypatch.setattr(dist, "all_gather_object", lambda results, mine, group: results.__setitem__(0, mine))
    (tmp_path / "checkpoints").touch()
    with pytest.raises(CheckpointError, match=r"checkpoint after step 4: rank 0: .*checkpoints/.*: Not a directory"):
        Saver(tmp_path / "checkpoints", CheckpointConfig(), ALONE).save(4, {}, {}, wait=True)


def told_while(tmp_path, work) -> list[str]:
    """What the watchdog hears while a run waits for a save that does `work`."""
    told: list[str] = []
    saver = Saver(tmp_path / "checkpoints", CheckpointConfig(), ALONE)
    saver._thread = threading.Thread(target=work)
    saver._thread.start()
    saver.wait(told.append)
    return told


def test_a_disk_that_does_not_answer_is_no_progress(tmp_path):
    """Three looks, a second apart; the first is told."""
    assert told_while(tmp_path, lambda: time.sleep(2.5)) == [WAITING]


def test_bytes_are_progress(tmp_path):
    def work():
        with (tmp_path / "file").open("wb", buffering=0) as file:
            for _ in range(25):
                file.write(b"x")
                time.sleep(0.1)

    told = told_while(tmp_path, work)
    assert len(told) >= 3
    assert set(told) == {WAITING}
