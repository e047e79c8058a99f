"""The batch script on a real SLURM of two nodes: to the end, stopped and requeued, cancelled; and by shellcheck."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from megamem.cli.launch import launch
from tests.cluster.runs import STEPS, losses, megamem, tiny_run, wait_for
from tests.cluster.slurm import Slurm
from tests.integration.commands import LENGTH

pytestmark = [pytest.mark.cluster, pytest.mark.distributed]
ROOT = Path(__file__).resolve().parents[2]
START_S = 300
"""Imports of torch and DeepSpeed twice over, on a busy machine."""


class Launched:
    """A run handed to SLURM by `megamem launch --submit`."""

    def __init__(self, slurm: Slurm, config: Path, *overrides: str) -> None:
        venv = f"slurm.venv={sys.prefix}"
        said = megamem(
            "launch", str(config), "--on", "slurm", "--submit", venv, "stop_seconds=60", *overrides, **slurm.environment
        )
        self.slurm, self.job = slurm, re.search(r"Submitted batch job (\d+)", said)[1]
        self.run = config.parent / "runs" / config.stem
        (self.folder,) = (self.run / "launch").iterdir()

    def log(self) -> str:
        """Of the script and of the node."""
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("*.log")))

    def wait_for_step(self, step: int) -> None:
        wait_for(lambda: len(losses(self.run)) >= step, START_S, self.log)

    def completes(self) -> None:
        state = self.slurm.wait(self.job, {"COMPLETED", "FAILED", "CANCELLED"}, 2 * START_S)
        assert state == "COMPLETED", self.log()


@pytest.fixture(scope="module")
def whole(slurm, data, tmp_path_factory):
    """A run that nothing interrupts, submitted: each node takes a job, so it runs beside the next one."""
    return Launched(slurm, tiny_run(data, tmp_path_factory.mktemp("whole")))


@pytest.mark.timeout(1800)
def test_a_signal_saves_and_requeues_and_the_run_is_the_uninterrupted_one(slurm, whole, data, tmp_path):
    """As SLURM sends it before the time limit and at preemption: to the batch shell, which passes it on."""
    launched = Launched(slurm, tiny_run(data, tmp_path))
    launched.wait_for_step(3)
    slurm.run("scancel", "--signal=TERM", "--batch", launched.job)
    slurm.wait(launched.job, {"PENDING"}, START_S)
    interrupted_at = len(losses(launched.run))
    assert 3 <= interrupted_at < STEPS, "the run was over before it was interrupted"
    assert "requeued" in launched.log()
    saved = [path.name for path in (launched.run / "checkpoints").iterdir() if path.name.startswith("step-")]
    assert saved == [f"step-{interrupted_at:08d}"]
    launched.completes()
    whole.completes()
    assert "goes on from" in launched.log()
    assert losses(launched.run) == losses(whole.run)  # bit for bit


@pytest.mark.timeout(1800)
def test_a_run_to_its_end(whole):
    whole.completes()
    assert sorted(losses(whole.run)) == list(range(1, STEPS + 1))
    assert (whole.run / "result.json").exists()
    (log,) = whole.folder.glob("0-*.log")
    assert f"step {STEPS}/{STEPS}" in log.read_text(), "the node's own log"
    assert {"config.yaml", "cluster.yaml", "job.sh", "snapshot.json", "packages.txt"} <= {
        path.name for path in whole.folder.iterdir()
    }


@pytest.mark.timeout(1800)
def test_two_nodes_are_stopped_before_the_time_limit_gone_on_with_and_cancelled(slurm, data, tmp_path):
    """A stage of the pipeline on each. SLURM signals `stop_seconds` before the limit, which is brought so near that
    the signal is due.
    """
    training = {"steps": 100_000, "batch_tokens": 4 * LENGTH}
    config = tiny_run(data, tmp_path, training=training, parallel={"pp": 2})
    launched = Launched(slurm, config, "nodes=2", "stop_seconds=600", 'slurm.time="1:00:00"')
    launched.wait_for_step(3)
    slurm.run("scontrol", "update", f"JobId={launched.job}", "TimeLimit=10")
    slurm.wait(launched.job, {"PENDING"}, START_S)
    slurm.run("scontrol", "update", f"JobId={launched.job}", "TimeLimit=60")
    assert "requeued" in launched.log()
    reached = len(losses(launched.run))
    launched.wait_for_step(reached + 3)
    said_requeued = launched.log().count("requeued")
    slurm.run("scancel", launched.job)
    slurm.wait(launched.job, {"CANCELLED"}, START_S)
    ended = launched.folder / "ended"
    wait_for(ended.exists, START_S, launched.log)
    assert ended.read_text() == "75\n", "the run was stopped, it did not fail"
    assert launched.log().count("megamem: 2 node(s) x 1 rank(s) start\n") == 2
    assert f"step-{reached:08d}" in re.search(r"goes on from (.*)", launched.log())[1]
    assert len([*launched.folder.glob("[01]-*.log")]) == 2
    assert slurm.state(launched.job) == "CANCELLED"
    assert launched.log().count("requeued") == said_requeued, "a cancelled job is not"


@pytest.mark.timeout(1800)
def test_a_wrong_run_is_not_tried_again(slurm, data, tmp_path):
    """Found by the rank only: what the launcher checks was still right then."""
    launched = Launched(slurm, tiny_run(data, tmp_path), "slurm.sbatch={hold: null}")
    config = launched.folder / "config.yaml"
    config.write_text(config.read_text().replace("layers: 2", "layers: two"))
    slurm.run("scontrol", "release", launched.job)
    assert slurm.wait(launched.job, {"COMPLETED", "FAILED"}, START_S) == "FAILED"
    assert "megamem: " in launched.log()
    assert "ended with 2, which trying again does not mend" in launched.log()


CASES = {
    "plain": (),
    "elastic": ("nodes=4", "min_nodes=2", "processes_per_node=1"),
    "modules": (
        "slurm.modules=[cuda/12.8, 'gcc/13']",
        "slurm.venv=/opt/my env",
        "environment={NCCL_DEBUG: INFO, A: 'b c'}",
    ),
    "pyxis": (
        "slurm.container=registry.example.org#me/megamem:1.0",
        "slurm.sbatch={gpus-per-node: 8, exclusive: null}",
    ),
    "apptainer": ("slurm.container=/images/megamem.sif", "slurm.container_with=apptainer"),
    "once": ("training.stop_after=2",),
}


@pytest.mark.parametrize("case", CASES)
def test_shellcheck_has_nothing_to_say(data, tmp_path, case):
    with pytest.raises(typer.Exit):
        launch(tiny_run(data, tmp_path), list(CASES[case]), on="slurm")
    (script,) = (tmp_path / "runs" / "run" / "launch").glob("*/job.sh")
    # a venv's activate is not there to be read
    done = subprocess.run(
        ["shellcheck", "--exclude=SC1090,SC1091", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
