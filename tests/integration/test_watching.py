"""What `megamem status` and `megamem runs` say of real runs: running, stopped, killed, finished, failed, slowed."""

from __future__ import annotations

import re
import signal
import time

import pytest

from megamem.errors import STOPPED, StuckRankError
from megamem.runs.heartbeat import NAME
from megamem.runs.status import RunStatus, find_runs, read_status
from tests.integration.commands import run_tree, write_config
from tests.integration.ranks import Job, command

pytestmark = [pytest.mark.distributed, pytest.mark.alone]
STALL_S = 6
"""A beat is a tenth of it."""
SOON_S = 40
"""Steps take a fraction of a second, on a busy machine seconds."""


def config_of(data, tmp_path, **sections):
    tree = run_tree(data, tmp_path / "runs", parallel={"tp": 2, "stall_timeout_s": STALL_S}, **sections)
    return write_config(tmp_path / "run.yaml", tree)


ENDLESS = {"training": {"steps": 100_000}, "evaluation": {"every": 0}, "logging": {"every": 1}}


def seen(folder, what) -> RunStatus:
    """The run once `what` holds of it."""
    deadline = time.monotonic() + SOON_S
    while not (folder / NAME).exists() or not what(read_status(folder)):
        assert time.monotonic() < deadline, (folder / NAME).read_text()
        time.sleep(0.1)
    return read_status(folder)


def test_a_run_from_its_beginning_to_its_violent_end(data, tmp_path):
    config, folder = config_of(data, tmp_path, **ENDLESS), tmp_path / "runs" / "run"
    with Job(tmp_path / "job", 2, command, "train", str(config)) as job:
        job.wait_for(r"step +2/")
        found = seen(folder, lambda run: run.beat.state == "training" and run.step >= 2 and run.beat.loss)
        assert found.condition == "running"
        assert found.beat.steps == 100_000
        assert found.beat.tokens > 0
        assert found.beat.tokens_per_second > 0
        assert found.beat.pid == job.processes[0].pid
        assert [rank.name for rank in found.beat.ranks] == ["rank 0 (dp 0, tp 0)", "rank 1 (dp 0, tp 1)"]
        seen(folder, lambda run: all(re.match(r"step \d+: ", rank.action) for rank in run.beat.ranks))
        assert list(find_runs(tmp_path / "runs")) == [folder]
        for rank in range(2):
            job.send(rank, signal.SIGTERM)
        assert job.codes(SOON_S) == [STOPPED] * 2
    stopped = read_status(folder)
    assert stopped.condition == "stopped"
    assert stopped.checkpoint[0] == stopped.step
    with Job(tmp_path / "again", 2, command, "train", str(config)) as job:
        seen(folder, lambda run: run.beat.state == "training" and run.step > stopped.step)
        for rank in range(2):
            job.send(rank, signal.SIGKILL)
        job.codes(SOON_S)
        assert read_status(folder).condition in ("running", "stale")  # not yet three beats late
        killed = seen(folder, lambda run: run.condition == "stale")
        assert killed.reason.startswith(f"process {job.processes[0].pid} on ")


def test_a_finished_run(data, tmp_path):
    config, folder = config_of(data, tmp_path), tmp_path / "runs" / "run"
    with Job(tmp_path / "job", 2, command, "train", str(config)) as job:
        assert job.codes(60) == [0, 0], job.output(0)
    found = read_status(folder)
    assert (found.condition, found.step, found.beat.steps, found.beat.eta_s) == ("done", 6, 6, 0)
    assert found.checkpoint[0] == 6
    assert found.val_loss == found.result.evaluation["val_loss"]
    assert found.beat.val_loss is not None, "of the validation after step 3"


def one_slow_rank(*arguments: str) -> None:
    """On a rank: the command, with rank 1 pausing in each step, forever once there is a file `hang` beside the runs."""
    import os
    from pathlib import Path

    from megamem.pipeline.engine import WindowEngine
    from megamem.training import slow_rank

    slow_rank.LEAST = 6  # a test need not train for minutes

    backward, sign = WindowEngine.backward, Path(arguments[1]).with_name("hang")

    def slowed(self, *given):
        if os.environ["RANK"] == "1":
            watch = given[-1]
            watch("a pause")
            time.sleep(600 if sign.exists() else 1)
        return backward(self, *given)

    WindowEngine.backward = slowed
    command(*arguments)


def test_a_slow_rank_is_named_and_one_that_hangs_ends_the_run(data, tmp_path):
    config, folder = config_of(data, tmp_path, **ENDLESS), tmp_path / "runs" / "run"
    with Job(tmp_path / "job", 2, one_slow_rank, "train", str(config)) as job:
        found = seen(folder, lambda run: run.beat.slow)
        process = f"{found.beat.host}:{job.processes[1].pid}"
        line = rf"rank 1 \(dp 0, tp 1\) \({process}\) is slower than the others of its stage: they wait \d+% of .*"
        assert re.fullmatch(line, found.beat.slow)
        shares = [rank.wait_share for rank in found.beat.ranks]
        assert shares[1] < shares[0] / 2
        assert found.condition == "running"
        time.sleep(2 * STALL_S / 10)
        assert len(re.findall(rf"^megamem: {line}$", job.output(0), re.MULTILINE)) == 1, "said once"
        (tmp_path / "hang").touch()
        assert job.codes(STALL_S + SOON_S) == [StuckRankError.exit_code] * 2
    failed = read_status(folder)
    assert (failed.condition, failed.beat.exit_code) == ("failed", StuckRankError.exit_code)
    assert failed.reason.startswith("rank 1 (dp 0, tp 1) makes no progress for ")
