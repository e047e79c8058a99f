"""Submit a study's runs to SLURM: those that are not done, not in its queue and have not failed for good."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path

from launchers.config import ClusterConfig
from launchers.launch import Launch, plan_launch
from launchers.slurm_jobs import submit_job
from launchers.target import find_target
from launchers.targets.slurm import SlurmTarget
from megamem.config.load import load_config, read_yaml
from megamem.config.run import RunConfig
from megamem.config.yaml_text import to_yaml
from megamem.errors import FINAL, STOPPED, MegamemError
from megamem.runs.result import RESULT
from megamem.study import tasks as processes
from megamem.study.config import StudyConfig
from megamem.study.grid import PlannedRun
from megamem.study.queue import study_lock
from megamem.study.status import RunStatus, run_statuses
from megamem.study.tasks import (
    Task,
    changes_of,
    evaluation_command,
    keep_figures,
    open_partial,
    plain,
    tasks,
    write_config,
)

TARGET = SlurmTarget.name
CONFIG, EVALUATIONS = "config.yaml", "evaluations.yaml"
"""Files in the job's folder: the run, and the changes of each evaluation after training, by name."""
Options = Mapping[str, str | int | None]
"""Options of sbatch, by their long names."""


@dataclass
class Submission:
    """The runs that were neither done nor in the queue: submitted, or not."""

    submitted: list[RunStatus] = field(default_factory=list)
    failed: list[RunStatus] = field(default_factory=list)
    """Runs that failed for good, and are not submitted."""


def submit_runs(
    study: StudyConfig,
    runs: Sequence[PlannedRun],
    cluster: ClusterConfig,
    report: Callable[[str], None],
    failed_too: bool,
) -> Submission:
    """Submit the runs that are not done, in SLURM's queue or failed for good; all jobs are checked before the first.

    Args:
        report: takes a line for each submitted run.
        failed_too: submit those that failed for good too.

    Raises: RunFolderError while another process runs the study, or as `tasks`; MegamemError if a job does not fit the
        cluster or SLURM refuses it.
    """
    found, ready = Submission(), []
    with study_lock(study) as lock:
        lock.take()
        tasks(study, runs)
        for number, status in enumerate(run_statuses(study, runs, strict=True)):
            if status.complete or status.in_queue:
                continue
            if failed_for_good(status, study.retries) and not failed_too:
                found.failed.append(status)
            else:
                ready.append((status, run_launch(study, cluster, status, one_after_another(study, status.run, number))))
        for status, launch in ready:
            if not status.trained:
                write_config(study, status.run)
            launch.write({EVALUATIONS: to_yaml(plain(changes_of(study, status.run)))})
            report(f"{status.run.name}: {submit_job(launch.job.folder)}")
            found.submitted.append(status)
    return found


def run_launch(study: StudyConfig, cluster: ClusterConfig, status: RunStatus, options: Options) -> Launch:
    """Return the job of a run on SLURM, with its evaluations after it, checked but not written.

    Where only evaluations are left it takes one node.

    Args:
        options: of sbatch, besides the cluster's.

    Raises: MegamemError if the job does not fit the cluster.
    """
    target = find_target(TARGET, cluster)
    assert isinstance(target, SlurmTarget)
    sbatch = {**target.sbatch, **options}
    if "dependency" in target.sbatch and "dependency" in options:
        sbatch["dependency"] = f"{target.sbatch['dependency']},{options['dependency']}"
    cluster = cluster.model_copy(update={TARGET: target.model_copy(update={"sbatch": sbatch})})
    launch = plan_launch(status.run.config, cluster, TARGET)
    job = launch.job
    if changes_of(study, status.run):
        job = replace(
            job, follow_up=("study", "evaluate", str(job.folder)), result=status.run.config.run_folder / RESULT
        )
    if status.trained:
        one_node = cluster.model_copy(update={"nodes": 1, "min_nodes": None})
        job = replace(job, cluster=one_node, processes=1, node_counts=(1,))
    else:
        launch.check_machine()
    return replace(launch, job=job)


def failed_for_good(status: RunStatus, retries: int) -> bool:
    """Return whether the last job failed in a way that is the same the next time, or more than `retries` jobs did."""
    if not status.jobs or not status.jobs[-1].failed:
        return False
    # those that ended well before, such as of a run that has been made longer since, begin the count anew
    failures = list(takewhile(lambda job: job.failed or job.code == STOPPED, reversed(status.jobs)))
    return status.jobs[-1].code in FINAL or sum(job.failed for job in failures) > retries


def one_after_another(study: StudyConfig, run: PlannedRun, number: int) -> Options:
    """Return the options that keep to `jobs`: SLURM runs one at a time of jobs with the same name and this dependency.

    number: of the run among all of the study.
    """
    if study.jobs is None:
        return {}
    return {"job-name": f"{study.name}-{number % study.jobs}", "dependency": "singleton", "comment": run.name}


def evaluate_here(folder: Path) -> int:
    """Make the evaluations of a job in `folder` that are not there yet, one after another.

    Returns: the first exit code that is not 0, or 0.
    """
    run = PlannedRun({}, read_yaml(folder / CONFIG), load_config(RunConfig, folder / CONFIG))
    code = 0
    for name, change in read_yaml(folder / EVALUATIONS).items():
        task = Task(run, name, evaluation_command(run, change), folder, change)
        if task.done:
            continue
        with open_partial(task) as out:
            ended = subprocess.run([*processes.COMMAND, *task.command], stdout=out, check=False).returncode
        if ended == 0:
            keep_figures(task)
        if not task.done:
            code = code or (128 - ended if ended < 0 else ended or MegamemError.exit_code)
    return code
