"""A rank that is lost, or whose disk does not answer, while all wait for a checkpoint."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest

from megamem.errors import MegamemError, StuckRankError
from tests.integration.commands import run_tree, write_config
from tests.integration.ranks import Job, command

pytestmark = [pytest.mark.distributed, pytest.mark.alone]
STALL_S = 6
LIMIT_S = 60
"""Of a job that starts, saves after its first step and ends after STALL_S at the latest."""
SECOND = r"rank 1 \(dp 0, tp 1\)"


@pytest.fixture
def config(data, tmp_path):
    """A run that waits for each of its checkpoints."""
    tree = run_tree(
        data,
        tmp_path / "runs",
        parallel={"tp": 2, "stall_timeout_s": STALL_S},
        checkpoint={"every": 1, "asynchronous": False},
        evaluation={"every": 0},
    )
    return write_config(tmp_path / "run.yaml", tree)


def killed_in_a_save(*arguments: str) -> None:
    """On a rank: the command, in which rank 1 is killed while it hashes what it wrote."""
    from checkpoints.saver import Saver

    if os.environ["RANK"] == "1":
        Saver._written = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    command(*arguments)


def test_a_rank_that_is_lost_does_not_end_the_run_for_good(config, tmp_path):
    """As anywhere else in a step: code 1, after which an agent starts the ranks again."""
    with Job(tmp_path / "job", 2, killed_in_a_save, "train", str(config)) as job:
        assert job.codes(LIMIT_S) == [MegamemError.exit_code, -signal.SIGKILL], job.output(0)
        at = "waiting for the checkpoint to be written"
        line = rf"megamem: rank 0 \(dp 0, tp 0\) lost its connection to another rank, which has ended, at: {at}\n"
        assert re.fullmatch(line, job.output(0)), job.output(0)


def hangs_in_a_save(*arguments: str) -> None:
    """On a rank: the command, in which rank 1's disk does not answer once it has been written to."""
    from checkpoints.saver import Saver

    if os.environ["RANK"] == "1":
        Saver._written = lambda *_: time.sleep(600)
    command(*arguments)


def test_a_disk_that_does_not_answer_is_a_stuck_rank(config, tmp_path):
    """That with the disk, not the one whose save waits for it."""
    with Job(tmp_path / "job", 2, hangs_in_a_save, "train", str(config)) as job:
        assert job.codes(LIMIT_S) == [StuckRankError.exit_code] * 2, job.output(0)
        said = job.output(0) + job.output(1)
        at = "waiting for the checkpoint to be written"
        assert re.fullmatch(rf"megamem: {SECOND} makes no progress for \d+ s .*, last at: {at}; .*\n", said), said
