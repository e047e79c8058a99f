"""Disks that are full when a run writes: what it can do without does not end it, what ends it is said in one line."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from checkpoints.folder import checkpoints_in
from checkpoints.verify import verify
from megamem.errors import CheckpointError
from tests.integration.commands import run_tree, write_config
from tests.integration.ranks import Job, command

pytestmark = pytest.mark.distributed


def no_room_for_weights(*arguments: str) -> None:
    """On a rank: the command; there is no room for the final weights."""
    from checkpoints import weights

    def failing(path: Path, *_: object) -> None:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: 9 bytes needed, 0 bytes free", str(path))

    weights.write_tensors = failing
    command(*arguments)


def test_final_weights_that_do_not_fit_are_one_line_and_come_later(data: Path, tmp_path: Path) -> None:
    """All ranks end with the code, the last checkpoint is whole, and the same command ends the run."""
    config = write_config(tmp_path / "run.yaml", run_tree(data, tmp_path / "runs", parallel={"tp": 2}))
    with Job(tmp_path / "first", 2, no_room_for_weights, "train", str(config)) as job:
        assert job.codes(90) == [CheckpointError.exit_code] * 2, job.output(0)
        said = job.output(0)
    weights = tmp_path / "runs" / "run" / "model.safetensors"
    assert said == (
        f"megamem: {weights}: cannot be written (No space left on device: 9 bytes needed, 0 bytes free); once it can, "
        "the same command writes it\n"
    )
    (saved,) = checkpoints_in(tmp_path / "runs" / "run" / "checkpoints")
    assert saved.step == 6
    verify(saved)
    with Job(tmp_path / "second", 2, command, "train", str(config)) as job:
        assert job.codes(90) == [0, 0], job.output(0)
    assert weights.is_file()
    assert (tmp_path / "runs" / "run" / "result.json").is_file()
