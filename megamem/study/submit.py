"""Hand a study's runs to SLURM: those that are not done, not in its queue and have not failed for good."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megamem.config.load import load_config, read_yaml
from megamem.config.run import RunConfig
from megamem.errors import FINAL, MegamemError
from megamem.study import tasks as processes
from megamem.study.config import StudyConfig
from megamem.study.grid import PlannedRun
from megamem.study.queue import study_lock
from megamem.study.states import RunState, run_states
from megamem.study.tasks import Task, keep_figures, open_partial, reading_command, tasks

CONFIG, READINGS = "config.yaml", "readings.yaml"
"""In the job's folder: the run, and what is read after training, by name."""
Options = Mapping[str, str | int | None]
"""Of sbatch, by their long names."""
Prepare = Callable[[RunState, Options], Callable[[], str]]
"""From a run to what hands its job over and returns what sbatch said. Raises MegamemError if the job cannot be."""


@dataclass
class Submission:
    """What became of the runs that are not done and not in the queue."""

    submitted: list[RunState] = field(default_factory=list)
    failed: list[RunState] = field(default_factory=list)
    """For good: not submitted."""


def submit_runs(
    study: StudyConfig, runs: Sequence[PlannedRun], prepare: Prepare, said: Callable[[str], None], again: bool
) -> Submission:
    """Submit what is to be submitted; all jobs are checked before the first. again: those that failed for good too.

    Raises: RunFolderError while another process runs the study, or as `tasks`; what `prepare` and SLURM raise.
    """
    found, ready = Submission(), []
    with study_lock(study) as lock:
        lock.take()
        tasks(study, runs)
        for number, state in enumerate(run_states(study, runs, sure=True)):
            if state.complete or state.in_queue:
                continue
            if failed_for_good(state, study.retries) and not again:
                found.failed.append(state)
            else:
                ready.append((state, prepare(state, one_after_another(study, state.run, number))))
        for state, hand_over in ready:
            said(f"{state.run.name}: {hand_over()}")
            found.submitted.append(state)
    return found


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
