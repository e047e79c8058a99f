"""A run that is stopped or gives up ends at a step border, with its weights saved and its exit code."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from checkpoints.folder import checkpoints_in, folder_name, open_checkpoint
from checkpoints.read import compare
from checkpoints.verify import verify
from megamem.errors import STOPPED, NonFiniteError
from megamem.runs.heartbeat import read_beat
from tests.integration.commands import finish, megamem, run_tree, torchrun, write_config
from tests.integration.ranks import Job, command
from tests.integration.test_agent import Nodes

pytestmark = [pytest.mark.distributed, pytest.mark.alone, pytest.mark.usefixtures("interruptible")]

ENDLESS = {"training": {"steps": 100_000}, "parallel": {"tp": 2}, "evaluation": {"every": 0}, "logging": {"every": 1}}
SOON_S = 20
"""A step takes a fraction of a second; the rest is the end of two Python processes on a busy machine."""


@pytest.fixture
def endless(data, tmp_path):
    """(configuration file, run folder) of a run that does not end by itself."""
    return write_config(tmp_path / "run.yaml", run_tree(data, tmp_path / "runs", **ENDLESS)), tmp_path / "runs" / "run"


def wait_for_steps(folder: Path, process, steps: int, timeout_s: float = 600) -> None:
    deadline = time.monotonic() + timeout_s
    while not (folder / "metrics.jsonl").exists() or len(records(folder)) < steps:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)


def records(folder: Path) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


SAID = "stopped by a signal at a step border; the checkpoint is saved, and the same command goes on\n"


def assert_checkpoint(folder: Path) -> None:
    (newest,) = checkpoints_in(folder / "checkpoints")[-1:]
    verify(newest)
    assert newest.step == records(folder)[-1]["step"], "the step it was stopped at"


def assert_saved(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    assert all(bool(tensor.isfinite().all()) for tensor in weights.values())
    assert not (folder / "model.tmp").exists()
    assert not (folder / "result.json").exists()  # the run is not finished


SIGTERM, SIGINT = signal.SIGTERM, signal.SIGINT


class TestSignals:
    @pytest.mark.parametrize("number", [SIGTERM, pytest.param(SIGINT, marks=pytest.mark.slow)])
    def test_to_the_local_launcher(self, endless, number):
        config, folder = endless
        process = megamem("train", str(config))
        wait_for_steps(folder, process, 2)
        process.send_signal(number)
        begun = time.monotonic()
        code, out, err = finish(process, SOON_S)
        assert code == STOPPED
        assert out.count(SAID) == 1
        assert err == ""
        assert time.monotonic() - begun < SOON_S
        assert_saved(folder)
        assert_checkpoint(folder)

    @pytest.mark.parametrize("number", [pytest.param(SIGTERM, marks=pytest.mark.slow), SIGINT])
    def test_to_torchrun(self, endless, number):
        """torchrun passes the signal on and waits, but ends with 1 itself."""
        config, folder = endless
        process = megamem("train", str(config), launcher=torchrun(2))
        wait_for_steps(folder, process, 2)
        process.send_signal(number)
        code, out, _ = finish(process, SOON_S)
        assert code == 1
        assert out.count(SAID) == 1
        assert_saved(folder)
        assert_checkpoint(folder)


class TestWorkers:
    def test_a_signal_to_one_rank_stops_all_in_the_same_step(self, endless, tmp_path):
        config, folder = endless
        with Job(tmp_path / "job", 2, command, "train", str(config)) as job:
            job.wait_for(r"step +2/")
            job.send(1, signal.SIGTERM)
            assert job.codes(SOON_S) == [STOPPED, STOPPED]
            assert (job.output(0), job.output(1)) == ("", "")
        assert_saved(folder)
        assert_checkpoint(folder)

    def test_a_second_signal_acts_at_once(self, endless, tmp_path):
        config, _ = endless
        with Job(tmp_path / "job", 2, hold_at_step_3, "train", str(config)) as job:
            job.wait_for(r"holding")
            job.send(0, signal.SIGTERM)
            time.sleep(1.5)
            assert job.processes[0].is_alive()  # the step it holds is not over
            job.send(0, signal.SIGTERM)
            job.processes[0].join(5)
            assert job.processes[0].exitcode == -signal.SIGTERM

    def test_a_killed_rank_ends_the_job(self, endless):
        """The launcher names it and ends with 128 + 9."""
        config, folder = endless
        process = megamem("train", str(config))
        wait_for_steps(folder, process, 1)
        os.kill(pid_of_rank(process.pid, 1), signal.SIGKILL)
        code, _, err = finish(process, SOON_S)
        assert code == 128 + signal.SIGKILL
        assert "megamem: rank 1 was killed by SIGKILL\n" in err


@pytest.mark.slow
def test_launch_tries_again_what_may_pass(data, tmp_path):
    """A killed rank: the ranks start again and go on from the newest checkpoint, in the same command."""
    tree = run_tree(data, tmp_path / "runs", **ENDLESS, checkpoint={"every": 2})
    config, folder = write_config(tmp_path / "run.yaml", tree), tmp_path / "runs" / "run"
    process = megamem("launch", str(config), "max_restarts=1", "stop_seconds=40")
    wait_for_steps(folder, process, 4)
    os.kill(pid_of_rank(process.pid, 1), signal.SIGKILL)
    before = len(records(folder))
    wait_for_steps(folder, process, before + 5)
    process.send_signal(SIGTERM)
    code, out, err = finish(process, 3 * SOON_S)
    assert code == STOPPED
    assert "megamem: rank 1 was killed by SIGKILL\n" in err
    assert re.search(r"goes on from .*step-0", out)
    steps = [record["step"] for record in records(folder)]
    assert steps == list(range(1, len(steps) + 1))
    assert (folder / "launch").is_dir()


def hold_at_step_3(*arguments: str) -> None:
    """On a rank: the command, with a third step that lasts."""
    from megamem.pipeline.base import TrainingEngine

    step, count = TrainingEngine.step, 0

    def held(self, *given):
        nonlocal count
        count += 1
        if count == 3:
            print("holding", flush=True)
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:
                time.sleep(0.1)
        return step(self, *given)

    TrainingEngine.step = held
    command(*arguments)


def pid_of_rank(launcher: int, rank: int) -> int:
    """The launcher's child with this RANK."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            variables = (stat.parent / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended, or is another user's
        if parent == launcher and f"RANK={rank}".encode() in variables:
            return int(stat.parent.name)
    raise AssertionError(f"no rank {rank} under {launcher}")


def with_bad_steps(bad: list[int], *arguments: str) -> None:
    """On a rank: the command, with a NaN among rank 1's losses in some steps (from 1)."""
    from megamem.model.stage import Stage
    from megamem.pipeline.base import TrainingEngine

    step, losses, count = TrainingEngine.step, Stage.token_losses, 0

    def counted(self, *given):
        nonlocal count
        count += 1
        return step(self, *given)

    def spoilt(self, *given):
        found = losses(self, *given)
        if count in bad and os.environ["RANK"] == "1" and torch.is_grad_enabled():
            found = found * torch.where(torch.arange(found.numel()) == 3, math.nan, 1.0).view_as(found)
        return found

    TrainingEngine.step, Stage.token_losses = counted, spoilt
    command(*arguments)


class TestBadSteps:
    def run(self, data, tmp_path, bad, **sections):
        """(exit codes, folder, stderr per rank) of a data-parallel run of 8 steps, logged every second one."""
        training = {"steps": 8, "micro_batch_size": 1, "max_bad_steps": 3}
        tree = run_tree(data, tmp_path / "runs", training=training, evaluation={"every": 0}, **sections)
        config = write_config(tmp_path / "run.yaml", tree)
        with Job(tmp_path / "job", 2, with_bad_steps, bad, "train", str(config)) as job:
            return job.codes(120), tmp_path / "runs" / "run", [job.output(rank) for rank in range(2)]

    def test_single_bad_steps_are_skipped_and_counted(self, data, tmp_path):
        codes, folder, errors = self.run(data, tmp_path, [2, 3, 5])
        assert codes == [0, 0]
        assert errors == ["", ""]
        logged = {record["step"]: record for record in records(folder) if "loss" in record}
        assert {step: record["skipped"] for step, record in logged.items()} == {1: 0, 2: 1, 4: 2, 6: 3, 8: 3}
        assert logged[2]["loss"] is None  # the only step since the last line was skipped
        assert all(math.isfinite(logged[step]["loss"]) for step in (1, 4, 6, 8))
        assert json.loads((folder / "result.json").read_text())["steps"] == 8

    def test_what_was_skipped_before_a_checkpoint_is_known_after_it(self, data, tmp_path):
        """Streams: the memory is as it was before the skipped step, and the counters go on."""
        common = {"data": {"feeding": "streams", "documents": "pad"}, "checkpoint": {"every": 3, "keep_last": 9}}
        training = {"steps": 8, "micro_batch_size": 1, "max_bad_steps": 3}

        def train(name, bad, job, ends_with, **more):
            tree = run_tree(
                data, tmp_path / "runs", name=name, training={**training, **more}, evaluation={"every": 0}, **common
            )
            config = write_config(tmp_path / f"{job}.yaml", tree)
            with Job(tmp_path / job, 2, with_bad_steps, bad, "train", str(config)) as ranks:
                assert ranks.codes(120) == [ends_with] * 2, ranks.output(0)

        train("straight", [2, 3, 5], "straight", 0)
        train("halves", [2, 3], "first", STOPPED, stop_after=3)
        train("halves", [2], "second", 0)  # its second step is the run's fifth
        for step in (3, 6, 8):
            straight, halves = (
                open_checkpoint(tmp_path / "runs" / name / "checkpoints" / folder_name(step))
                for name in ("straight", "halves")
            )
            assert [str(difference) for difference in compare(straight, halves)[1]] == [], step
            assert straight.run()["bad_steps"] == halves.run()["bad_steps"], step
            assert halves.run()["optimizer_steps"] == step - (2 if step == 3 else 3)

    def test_too_many_in_a_row_end_the_run(self, data, tmp_path):
        """Steps 3 to 5: seen when step 6 is logged, named with their samples, and with the weights from before."""
        codes, folder, errors = self.run(data, tmp_path, [3, 4, 5])
        assert codes == [NonFiniteError.exit_code] * 2
        # nobody ends the second rank, as a launcher would once the first has spoken: after a while it says the same
        assert errors[1] == errors[0].replace("megamem: ", "megamem: rank 1: ")
        assert re.fullmatch(
            r"megamem: loss or gradients were not finite in steps 3-5, samples 8-19: 3 steps in a row "
            r"\(training\.max_bad_steps 3\) updated nothing; the weights from before them are saved\n",
            errors[0],
        )
        assert_saved(folder)
        assert records(folder)[-1]["skipped"] == 3

    def test_a_launcher_lets_rank_0_finish(self, data, tmp_path):
        """An agent ends all ranks as soon as one has ended; rank 0 alone writes weights, sinks and the line."""
        training = {"steps": 8, "micro_batch_size": 1, "max_bad_steps": 3}
        tree = run_tree(data, tmp_path / "runs", training=training, evaluation={"every": 0})
        config = write_config(tmp_path / "run.yaml", tree)
        line = f"from tests.integration.test_interrupts import slow_to_end; slow_to_end({str(config)!r})"
        with Nodes(tmp_path, line, nodes=1, processes=2, node_counts=(1,)) as nodes:
            assert nodes.codes(120) == [NonFiniteError.exit_code], nodes.output()
            said = nodes.output()
        assert said.count("megamem: loss or gradients were not finite in steps 3-5") == 1, said
        assert_saved(tmp_path / "runs" / "run")
        last = read_beat(tmp_path / "runs" / "run")
        assert (last.state, last.exit_code) == ("failed", NonFiniteError.exit_code)


def slow_to_end(config: str) -> None:
    """On a rank: as `with_bad_steps`; rank 0 takes a second to write the weights and one to close its sinks."""
    from checkpoints import weights
    from megamem.runs.heartbeat import Heartbeat

    write = weights.write_weights

    def slow(*given):
        time.sleep(1)
        write(*given)

    if os.environ["RANK"] == "0":
        weights.write_weights, Heartbeat.close = slow, lambda self: time.sleep(1)
    with_bad_steps([3, 4, 5], "train", config)
