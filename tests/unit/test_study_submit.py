"""A study's runs as jobs of SLURM, with stand-ins for sbatch and squeue."""

from __future__ import annotations

import json
import os
import re
import time
from itertools import count
from pathlib import Path

import pytest
import typer
import yaml

from launchers import launch, snapshot
from launchers.slurm_jobs import in_queue, slurm_jobs
from megamem.cli import study as cli_study
from megamem.cli.study import list_runs, run
from megamem.errors import ConfigError, DependencyError, MegamemError, RunFolderError
from megamem.runs.result import RunResult, write_result
from megamem.study import tasks as processes
from megamem.study.grid import load_study, planned_runs, study_folder
from megamem.study.journal import Journal
from megamem.study.queue import Queue, check_not_submitted, shares, study_lock, visible_devices
from megamem.study.status import run_statuses
from megamem.study.submit import evaluate_here
from tests.integration.commands import run_tree, write_config

REPORT = cli_study._report
SBATCH = """#!/bin/sh
number=$(($(wc -l < {folder}/submitted) + 41))
echo "$1" >> {folder}/submitted
echo "$number PENDING" >> {folder}/shown
echo "Submitted batch job $number"
"""
SQUEUE = """#!/bin/sh
[ -e {folder}/down ] && { echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1; }
echo "$2" > {folder}/asked
[ -s {folder}/shown ] || { echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; }
cat {folder}/shown
"""


class Cluster:
    """What squeue shows, by number, and what sbatch was given."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "submitted").touch()
        for name, text in (("sbatch", SBATCH), ("squeue", SQUEUE)):
            path = folder / name
            path.write_text(text.replace("{folder}", str(folder)))
            path.chmod(0o755)

    def show(self, **states):
        """show(j41="RUNNING"): this and nothing else is in the queue."""
        (self.folder / "shown").write_text("".join(f"{n[1:]} {state}\n" for n, state in states.items()))

    @property
    def submitted(self):
        return len((self.folder / "submitted").read_text().splitlines())

    def script(self, number):
        return Path((self.folder / "submitted").read_text().splitlines()[number - 41]).read_text()


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    starts = count()
    name = lambda run_folder: run_folder / snapshot.FOLDER / f"20260101T{next(starts):06}Z"  # noqa: E731, many a second
    monkeypatch.setattr(launch, "snapshot_folder", name)
    monkeypatch.setattr(cli_study, "_report", lambda *_: None)  # half a second each; but for the tests of it
    return Cluster(folder)


@pytest.fixture
def path(data, tmp_path):
    """File of a study of two runs, one of them with an evaluation."""
    write_config(tmp_path / "run.yaml", run_tree(data, tmp_path / "elsewhere"))
    evaluation = {"where": {"order": ["more"]}, "change": {"model.memory.0.mixer.sampling": "exponential"}}
    tree = {
        "name": "pair",
        "run": "run.yaml",
        "folder": str(tmp_path / "studies"),
        "axes": {"order": {"few": {"model.memory.0.mixer.order": 4}, "more": {}}},
        "evaluations": {"other": evaluation},
        "tables": [{"name": "t", "title": "T", "figure": "val_loss", "rows": "order", "columns": "evaluation"}],
    }
    return write_config(tmp_path / "study.yaml", tree)


def submit(path, *overrides, ends_with=0, **options):
    """`megamem study run --on slurm`."""
    code = 0
    try:
        run(path, list(overrides), on="slurm", **options)
    except typer.Exit as ended:
        code = ended.exit_code
    assert code == ends_with


def states(path, *overrides):
    study = load_study(path, overrides)
    return {state.run.name: state for state in run_statuses(study, planned_runs(study))}


def finish(path, name, code, evaluation=False):
    """Files that the last job of a run leaves."""
    found = states(path)[name].run
    job = slurm_jobs(found.folder)[-1]
    (job.folder / "ended").write_text(f"{code}\n")
    if code == 0:
        write_result(
            found.folder, RunResult(str(found.folder), found.config.training.steps, 400, 1.0, (1.0,), {"val_loss": 2.0})
        )
        if evaluation:
            change = {"model.memory.0.mixer.sampling": "exponential"}
            (found.folder / "evaluation-other.json").write_text(json.dumps({"change": change, "val_loss": 3.0}))
    return job


def test_all_are_submitted_once_and_nothing_twice(path, cluster, capsys, monkeypatch):
    submit(path, "slurm.partition=debug")
    assert cluster.submitted == 2
    assert re.findall(r"(\S+): Submitted batch job (\d+)", capsys.readouterr().out) == [
        ("few-0", "41"), ("more-0", "42")
    ]  # fmt: skip
    submit(path)
    assert cluster.submitted == 2, "they are queued"
    cluster.show(j41="RUNNING", j42="COMPLETING")
    submit(path)
    assert cluster.submitted == 2
    assert (cluster.folder / "asked").read_text() == "--jobs=41,42\n"
    finish(path, "few-0", 0)
    finish(path, "more-0", 0, evaluation=True)
    cluster.show()
    monkeypatch.setattr(cli_study, "_report", REPORT)
    submit(path)
    assert cluster.submitted == 2, "they are done"
    assert all(state.complete for state in states(path).values())
    assert "| more | 2 | 3 |" in capsys.readouterr().out, "the table"


def test_a_job_trains_then_reads(path, cluster):
    submit(path, "nodes=1", "slurm.time=1-0")
    without, with_evaluation = cluster.script(41), cluster.script(42)
    assert "study evaluate" not in without
    job = slurm_jobs(states(path)["more-0"].run.folder)[-1]
    assert f"python -m megamem study evaluate {job.folder}\n" in with_evaluation
    assert "#SBATCH --time=1-0\n" in with_evaluation
    assert yaml.safe_load((job.folder / "evaluations.yaml").read_text()) == {
        "other": {"model.memory.0.mixer.sampling": "exponential"}
    }
    assert {"config.yaml", "cluster.yaml", "snapshot.json"} <= {file.name for file in job.folder.iterdir()}
    assert "singleton" not in with_evaluation, "the cluster decides how many at a time"


def test_what_is_left_of_a_trained_run_takes_one_node(path, cluster):
    submit(path, "nodes=2", "processes_per_node=1")
    assert "#SBATCH --nodes=2\n" in cluster.script(42)
    finish(path, "few-0", 0)
    finish(path, "more-0", 0)
    cluster.show()
    submit(path, "nodes=2", "processes_per_node=1")
    assert cluster.submitted == 3
    assert "#SBATCH --nodes=1\n" in cluster.script(43)


def listed(path, capsys):
    capsys.readouterr()
    list_runs(path)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return {line["run"]: line for line in lines}


def test_where_they_stand(path, cluster, capsys):
    assert {name: state.state for name, state in states(path).items()} == {"few-0": "waiting", "more-0": "waiting"}
    submit(path)
    cluster.show(j41="RUNNING", j42="PENDING")
    found = states(path)
    assert (found["few-0"].state, found["more-0"].state) == ("running", "queued")
    assert found["more-0"].jobs[-1].number == "42"
    assert [(line["state"], line["job"], line["done"]) for line in listed(path, capsys).values()] == [
        ("running", "41", False), ("queued", "42", False)
    ]  # fmt: skip
    REPORT(path, None)
    assert "queued (job 42), 0 of 1 evaluations" in (path.parent / "studies/pair/report.html").read_text()
    finish(path, "few-0", 75)
    cluster.show(j42="RUNNING", j41="PENDING")
    assert states(path)["few-0"].state == "queued", "requeued by its script"
    cluster.show(j42="RUNNING", j41="COMPLETED")
    assert states(path)["few-0"].state == "stopped", "squeue may show jobs that are over"
    finish(path, "more-0", 0)
    assert states(path)["more-0"].state == "running", "at its evaluations"
    cluster.show()
    assert (states(path)["more-0"].state, states(path)["more-0"].complete) == ("trained", False)
    assert listed(path, capsys)["more-0"].items() >= {"state": "trained", "done": False}.items(), (
        "its evaluation is missing"
    )
    assert listed(path, capsys)["more-0"]["evaluations"] == {"done": 0, "of": 1}


def test_a_run_that_failed_is_submitted_again_so_often(path, cluster, capsys):
    submit(path)
    job = finish(path, "few-0", 6)
    (job.folder / "0-node.log").write_text("step 1\nmegamem: rank 0 makes no progress\n")
    cluster.show(j42="RUNNING")
    failed = states(path)["few-0"]
    assert failed.state == "failed"
    assert failed.failures == ("job 41: exit code 6, megamem: rank 0 makes no progress",)
    submit(path)
    assert cluster.submitted == 3
    cluster.show(j42="RUNNING")
    assert states(path)["few-0"].failures == ("job 43: is gone without an exit code",), "killed"
    submit(path, ends_with=1)
    assert cluster.submitted == 3, "retries is 1"
    assert "failed: few-0: job 43: is gone without an exit code" in capsys.readouterr().out
    submit(path, "retries=2")
    assert cluster.submitted == 4
    finish(path, "few-0", 6)
    cluster.show(j42="RUNNING")
    submit(path, ends_with=1)
    submit(path, retry_failed=True)
    assert cluster.submitted == 5


def test_what_would_fail_again_is_not_submitted_again(path, cluster):
    submit(path)
    finish(path, "few-0", 5)
    finish(path, "more-0", 75)
    cluster.show()
    submit(path, ends_with=1)
    assert cluster.submitted == 3, "the one that was stopped, not the one whose loss was not finite"
    submit(path, retry_failed=True)
    assert cluster.submitted == 4


def test_so_many_at_a_time(path, cluster):
    submit(path, "jobs=2", "seeds=[0, 1]", "slurm.sbatch={dependency: 'afterok:7', comment: mine}")
    names = [re.search(r"--job-name=(\S+)", cluster.script(number))[1] for number in range(41, 45)]
    assert names == ["pair-0", "pair-1", "pair-0", "pair-1"]
    assert "#SBATCH --dependency=afterok:7,singleton\n" in cluster.script(41)
    assert "#SBATCH --comment=few-0\n" in cluster.script(41)


def test_nothing_is_submitted_if_one_cannot_be(path, cluster, data):
    with pytest.raises(ConfigError, match="processes_per_node 3"):
        submit(path, "processes_per_node=3")
    with pytest.raises(ConfigError, match="partitoin"):
        submit(path, "slurm.partitoin=x")
    with pytest.raises(ConfigError, match="--cluster: goes with --on slurm only"):
        run(path, cluster=Path("slurm.yaml"))
    assert cluster.submitted == 0


def test_a_study_has_one_owner(path, cluster):
    study = load_study(path)
    with study_lock(study) as lock:
        lock.take()
        with pytest.raises(RunFolderError, match="another process is running this study"):
            submit(path)
    submit(path)
    with pytest.raises(RunFolderError, match=r"few-0: is job 41 of SLURM, queued; go on with --on slurm"):
        Queue(study, print, lambda done, total: None).run(planned_runs(study))
    with pytest.raises(RunFolderError, match="was begun with another configuration"):
        submit(path, "change={optimizer.lr: 0.5}")


def test_a_cluster_that_does_not_answer(path, cluster, monkeypatch):
    submit(path)
    (cluster.folder / "down").touch()
    with pytest.raises(MegamemError, match="Unable to contact slurm controller"):
        submit(path)
    assert cluster.submitted == 2, "nothing is submitted blindly"
    assert {state.state for state in states(path).values()} == {"submitted"}
    study = load_study(path)
    with pytest.raises(RunFolderError, match=r"SLURM may have runs of it: squeue .*Unable to contact"):
        check_not_submitted(study, planned_runs(study))
    (cluster.folder / "squeue").unlink()
    monkeypatch.setenv("PATH", str(cluster.folder))
    check_not_submitted(study, planned_runs(study))  # SLURM is not of this machine
    with pytest.raises(DependencyError, match="squeue is not installed here"):
        in_queue(["41"])


def test_a_process_of_this_machine_that_is_newer_than_the_job(path, cluster):
    """A job that failed, then the study on this machine, which was stopped."""
    submit(path)
    finish(path, "few-0", 6)
    cluster.show(j42="RUNNING")
    journal = Journal(study_folder(load_study(path)))
    for name in ("few-0", "more-0"):
        journal.began(name, "trained")
        journal.ended(name, "trained", 75)
    found = states(path)
    assert (found["few-0"].state, found["more-0"].state) == ("stopped", "running"), "what SLURM has goes before"


def test_a_process_that_began_within_a_millisecond_of_the_job_is_newer(path, cluster, monkeypatch):
    submit(path)
    finish(path, "few-0", 6)
    cluster.show(j42="RUNNING")
    folder = study_folder(load_study(path))
    (number,) = (folder / "runs" / "few-0").glob("launch/*/job")
    os.utime(number, ns=(0, 1_800_000_000_000_100_000))
    monkeypatch.setattr(time, "time", lambda: 1_800_000_000.0003)
    Journal(folder).began("few-0", "trained")
    Journal(folder).ended("few-0", "trained", 75)
    assert states(path)["few-0"].state == "stopped"


def test_what_sbatch_refuses_is_left_for_the_next_call(path, cluster):
    sbatch = (cluster.folder / "sbatch").read_text()
    limit = f"[ -s {cluster.folder}/submitted ] && {{ echo QOSMaxSubmitJobPerUserLimit >&2; exit 1; }}"
    (cluster.folder / "sbatch").write_text(sbatch.replace("\n", f"\n{limit}\n", 1))
    with pytest.raises(MegamemError, match="QOSMaxSubmitJobPerUserLimit"):
        submit(path)
    assert {name: state.state for name, state in states(path).items()} == {"few-0": "queued", "more-0": "waiting"}
    (cluster.folder / "sbatch").write_text(sbatch)
    submit(path)
    assert cluster.submitted == 2


def test_a_number_that_was_lost(path, cluster):
    """The command was killed between sbatch and the file: nobody knows whether SLURM has the job."""
    submit(path)
    job = slurm_jobs(states(path)["few-0"].run.folder)[-1].folder / "job"
    job.write_text("")
    cluster.show(j42="RUNNING")
    assert {name: state.state for name, state in states(path).items()} == {"few-0": "submitted", "more-0": "running"}
    with pytest.raises(MegamemError, match="job: is empty, so SLURM may have the job"):
        submit(path)
    assert cluster.submitted == 2
    job.unlink()
    submit(path)
    assert cluster.submitted == 3


def test_sbatch_that_gives_no_number(path, cluster):
    (cluster.folder / "sbatch").write_text("#!/bin/sh\necho thank you\n")
    with pytest.raises(MegamemError, match="gave no job number, but 'thank you'"):
        submit(path)


FAKE = """
import json, sys
if "exponential" in " ".join(sys.argv):
    print(json.dumps({"val_loss": 3.0}))
else:
    sys.exit(9)
"""


def test_evaluations_in_a_job(path, cluster, tmp_path, monkeypatch):
    """Each into its own file; one that fails does not keep the others from being made."""
    submit(path)
    job = finish(path, "more-0", 0)
    (tmp_path / "fake.py").write_text(FAKE)
    monkeypatch.setattr(processes, "COMMAND", ["/usr/bin/env", "python3", str(tmp_path / "fake.py")])
    evaluations = yaml.safe_load((job.folder / "evaluations.yaml").read_text())
    uniform = {"model.memory.0.mixer.sampling": "uniform"}
    (job.folder / "evaluations.yaml").write_text(yaml.safe_dump({"uniform": uniform, **evaluations}, sort_keys=False))
    assert evaluate_here(job.folder) == 9
    found = states(path)["more-0"]
    assert found.evaluations == (1, 1)
    assert json.loads((found.run.folder / "evaluation-other.json").read_text())["val_loss"] == 3.0


# --- devices of runs side by side on one machine ---


@pytest.mark.parametrize(
    ("devices", "parallel", "ranks", "expected"),
    [
        ("0123", 2, 1, ["0,1", "2,3"]),
        ("0123", 2, 2, ["0,1", "2,3"]),
        ("012", 2, 1, ["0", "1"]),
        ("0123", 1, 1, []),  # one run sees all
        ("0", 2, 1, []),  # too few
        ("0123", 2, 3, []),
        ("", 2, 1, []),
    ],
)
def test_shares_of_devices(devices, parallel, ranks, expected):
    assert shares(list(devices), parallel, ranks) == expected


def test_devices_that_a_user_chose(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    assert visible_devices() == ["GPU-a", "GPU-b"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_devices() == []
