"""Hand a study's runs to SLURM: those that are not done, not in its queue and have not failed for good."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml

from launchers.config import ClusterConfig
from launchers.launch import Launch, plan_launch
from launchers.slurm_jobs import submit_job
from launchers.target import find_target
from launchers.targets.slurm import SlurmTarget
from megamem.config.load import load_config, read_yaml
from megamem.config.run import RunConfig
from megamem.errors import FINAL, MegamemError
from megamem.runs.result import RESULT
from megamem.study import tasks as processes
from megamem.study.config import StudyConfig
from megamem.study.grid import PlannedRun
from megamem.study.queue import study_lock
from megamem.study.states import RunState, run_states
from megamem.study.tasks import Task, changes_of, keep_figures, open_partial, plain, reading_command, tasks

TARGET = SlurmTarget.name
CONFIG, READINGS = "config.yaml", "readings.yaml"
"""In the job's folder: the run, and what is read after training, by name."""
Options = Mapping[str, str | int | None]
"""Options of sbatch, by their long names."""


@dataclass
class Submission:
    """What became of the runs that are not done and not in the queue."""

    submitted: list[RunState] = field(default_factory=list)
    failed: list[RunState] = field(default_factory=list)
    """For good: not submitted."""


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
        for number, state in enumerate(run_states(study, runs, sure=True)):
            if state.complete or state.in_queue:
                continue
            if failed_for_good(state, study.retries) and not failed_too:
                found.failed.append(state)
            else:
                ready.append((state, run_launch(study, cluster, state, one_after_another(study, state.run, number))))
        for state, launch in ready:
            launch.write({READINGS: yaml.safe_dump(plain(changes_of(study, state.run)), sort_keys=False)})
            report(f"{state.run.name}: {submit_job(launch.job.folder)}")
            found.submitted.append(state)
    return found


def run_launch(study: StudyConfig, cluster: ClusterConfig, state: RunState, options: Options) -> Launch:
    """Return the job of a run on SLURM, with its readings after it, checked but not written.

    Where only readings are left it takes one node.

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
    launch = plan_launch(state.run.config, cluster, TARGET)
    job = launch.job
    if changes_of(study, state.run):
        job = replace(job, follow_up=("study", "read", str(job.folder)), result=state.run.config.run_folder / RESULT)
    if state.trained:
        one_node = cluster.model_copy(update={"nodes": 1, "min_nodes": None})
        job = replace(job, cluster=one_node, processes=1, node_counts=(1,))
    else:
        launch.check_machine()
    return replace(launch, job=job)


def failed_for_good(state: RunState, retries: int) -> bool:
    """Whether the run's last job failed in a way that is the same the next time, or more than `retries` did."""
    if not state.jobs or not state.jobs[-1].failed:
        return False
    return state.jobs[-1].code in FINAL or sum(job.failed for job in state.jobs) > retries


def one_after_another(study: StudyConfig, run: PlannedRun, number: int) -> Options:
    """What keeps to `jobs`: SLURM runs one at a time of jobs that have the same name and this dependency.

    number: of the run among all of the study.
    """
    if study.jobs is None:
        return {}
    return {"job-name": f"{study.name}-{number % study.jobs}", "dependency": "singleton", "comment": run.name}


def read_here(folder: Path) -> int:
    """Make the readings of a job in `folder` that are not there yet, one after another; the first exit code but 0."""
    run = PlannedRun({}, read_yaml(folder / CONFIG), load_config(RunConfig, folder / CONFIG))
    code = 0
    for name, change in read_yaml(folder / READINGS).items():
        task = Task(run, name, reading_command(run, change), folder, change)
        if task.done:
            continue
        with open_partial(task) as out:
            ended = subprocess.run([*processes.COMMAND, *task.command], stdout=out, check=False).returncode
        if ended == 0:
            keep_figures(task)
        if not task.done:
            code = code or (128 - ended if ended < 0 else ended or MegamemError.exit_code)
    return code
