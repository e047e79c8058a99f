"""`megamem study run --on slurm` on a real SLURM: submitted, killed, submitted again, read, reported."""

from __future__ import annotations

import json
import re
import sys

import pytest

from tests.cluster.runs import STEPS, losses, megamem, wait_for
from tests.integration.commands import run_tree, write_config

pytestmark = [pytest.mark.cluster, pytest.mark.distributed]
LONG_S = 300
"""Imports of torch and DeepSpeed, on a busy machine."""


@pytest.fixture
def study(data, tmp_path):
    """File of a study of two runs with an evaluation each."""
    training = {"steps": STEPS, "micro_batch_size": 1}
    sections = {"checkpoint": {"every": 2}, "evaluation": {"every": 0}, "logging": {"every": 1}}
    write_config(tmp_path / "run.yaml", run_tree(data, tmp_path, training=training, **sections))
    tree = {
        "name": "pair",
        "run": "run.yaml",
        "folder": str(tmp_path / "studies"),
        "axes": {"order": {"few": {"model.memory.0.mixer.order": 4}, "more": {}}},
        "evaluations": {"short": {"change": {"evaluation.final_max_tokens": 256}}},
        "tables": [
            {"name": "t", "title": "Losses", "figure": "val_tokens", "rows": "order", "columns": "evaluation"},
        ],
    }
    return write_config(tmp_path / "study.yaml", tree)


@pytest.mark.timeout(1800)
def test_a_study_is_submitted_and_gone_on_with(slurm, study, tmp_path):
    options = ("--on", "slurm", f"slurm.venv={sys.prefix}", "stop_seconds=60", "max_restarts=0", "jobs=1")
    few, more = (tmp_path / "studies" / "pair" / "runs" / name for name in ("few-0", "more-0"))

    def call(verb, *words):
        return megamem("study", verb, str(study), *words, **slurm.environment)

    def states():
        lines = [json.loads(line) for line in call("list").splitlines()]
        return [(line["run"], line["job"], line["state"]) for line in lines]

    def logs():
        return "\n".join(path.read_text(errors="replace") for path in sorted(few.parent.glob("*/launch/*/*.log")))

    first, second = re.findall(r"Submitted batch job (\d+)", call("run", *options))
    wait_for(lambda: len(losses(few)) >= 3, LONG_S, logs)
    assert "Reason=Dependency" in slurm.run("scontrol", "show", "job", second), "one at a time"
    slurm.run("scancel", "--signal=KILL", "--full", first)  # the script too
    slurm.wait(first, {"FAILED", "CANCELLED", "COMPLETED"}, LONG_S)
    assert not (few / "result.json").exists(), "the run was over before it was killed"
    said = call("run", *options)
    (third,) = re.findall(r"few-0: Submitted batch job (\d+)", said)
    assert "1 submitted" in said, "the other one is there already"
    for job in (second, third):
        assert slurm.wait(job, {"COMPLETED", "FAILED", "CANCELLED"}, LONG_S) == "COMPLETED", logs()
    said = call("run", *options)
    assert "0 submitted" in said
    assert "| few | 512 | 256 |" in said
    assert "| more | 512 | 256 |" in said
    assert states() == [("few-0", third, "done"), ("more-0", second, "done")]
    for run in (few, more):
        assert sorted(losses(run)) == list(range(1, STEPS + 1))
        assert len(list(run.glob("evaluation-*.json"))) == 1
    assert "goes on from" in logs()
    assert "done, 1 of 1 evaluations" in (tmp_path / "studies" / "pair" / "report.html").read_text()
