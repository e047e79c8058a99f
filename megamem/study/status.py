"""The status of each run of a study, from its folders, the journal and SLURM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from launchers.slurm_jobs import NUMBER, SlurmJob, in_queue, slurm_jobs
from megamem.errors import STOPPED, MegamemError
from megamem.evaluation.metrics import last_step
from megamem.evaluation.report import METRICS
from megamem.runs.heartbeat import read_beat
from megamem.study.config import TRAINED, StudyConfig
from megamem.study.grid import PlannedRun, study_folder
from megamem.study.journal import History, last_words, read_journal
from megamem.study.tasks import changes_of, figures, goes_on, log_file


@dataclass(frozen=True)
class RunStatus:
    """The status of a training and the evaluations after it."""

    run: PlannedRun
    state: str
    """`done`, `trained` (evaluations are missing), `failed`, `stopped` (by a signal, with a checkpoint; or ended, and
    made longer since), `begun` (running, or killed) or `waiting`. A job that SLURM has not done with, evaluations
    included, is `queued` or `running`, or `submitted` if SLURM does not answer."""
    step: int
    """The step of the last log line; all steps once it is done."""
    steps: int
    """All steps of the training."""
    seconds: float
    """Time of its processes, evaluations included, as far as the queue saw their ends."""
    evaluations: tuple[int, int]
    """Number of evaluations that are done, and of all."""
    failures: tuple[str, ...]
    """One line for each process that failed."""
    jobs: tuple[SlurmJob, ...] = ()
    """Jobs that it was submitted as, oldest first."""

    @property
    def trained(self) -> bool:
        """Whether the training has its result."""
        return figures(self.run, TRAINED, None) is not None

    @property
    def complete(self) -> bool:
        """Whether training and evaluations have their results."""
        return self.trained and self.evaluations[0] == self.evaluations[1]

    @property
    def in_queue(self) -> bool:
        """Whether SLURM has not done with its job, as far as is known."""
        return self.state in ("queued", "running", "submitted")


def run_statuses(study: StudyConfig, runs: Sequence[PlannedRun], strict: bool = False) -> list[RunStatus]:
    """Return the status of all runs in the study's order.

    strict: raise MegamemError if SLURM is needed and does not answer.
    """
    journal = read_journal(study_folder(study))
    statuses = [_local_status(study, run, journal) for run in runs]
    jobs = [status.jobs[-1] for status in statuses if status.jobs and not status.complete]
    queued, asked = _in_queue(jobs, strict), {job.number for job in jobs}
    # once more after SLURM has answered: what a job that ended meanwhile has left is not lost
    if jobs:
        journal = read_journal(study_folder(study))
        statuses = [each if each.complete else _local_status(study, each.run, journal) for each in statuses]
    # submitted since
    queued |= {
        status.jobs[-1].number: "submitted"
        for status in statuses
        if status.jobs and not status.complete and status.jobs[-1].number not in asked
    }
    return [_with_job(status, journal, queued) if status.jobs else status for status in statuses]


def _local_status(study: StudyConfig, run: PlannedRun, journal: Mapping[tuple[str, str], History]) -> RunStatus:
    """Return the status as far as the files of this machine's queue say."""
    evaluations = changes_of(study, run)
    done, failures, seconds = [], [], 0.0
    longer = goes_on(run)
    for evaluation, change in {TRAINED: None, **evaluations}.items():
        history = journal.get((run.name, evaluation), History())
        seconds += history.seconds
        if figures(run, evaluation, change) is not None:
            done.append(evaluation)
        elif history.state == "failed" or (history.state == "ended" and not longer):
            words = last_words(log_file(study, run, evaluation))
            failures.append(f"{evaluation}: exit code {history.code}{', ' if words else ''}{words}")
    trained, steps = TRAINED in done, _steps(run)
    last = journal.get((run.name, TRAINED), History()).state
    if last == "ended":
        last = "stopped" if longer else "failed"
    return RunStatus(
        run,
        _trained_state(len(done) > len(evaluations)) if trained else last,
        steps if trained else _step(run),
        steps,
        seconds,
        (len(done) - trained, len(evaluations)),
        tuple(failures),
        tuple(slurm_jobs(run.folder)),
    )


def _in_queue(jobs: Sequence[SlurmJob], strict: bool) -> dict[str, str]:
    """Return the state of the jobs that SLURM has, by number; `submitted` where it is not known."""
    if strict and (lost := next((job for job in jobs if not job.number), None)):
        raise MegamemError(
            f"{lost.folder / NUMBER}: is empty, so SLURM may have the job; write its number there "
            "(squeue --me shows it), or remove the file if there is none"
        )
    try:
        return {**in_queue([job.number for job in jobs if job.number]), "": "submitted"}
    except MegamemError:
        if strict:
            raise
        return {job.number: "submitted" for job in jobs if job.code is None}


def _with_job(status: RunStatus, journal: Mapping[tuple[str, str], History], queued: Mapping[str, str]) -> RunStatus:
    """Return the status that the run's last job gives it, or `status` if a process of this machine began later."""
    job = status.jobs[-1]
    newer = journal.get((status.run.name, TRAINED), History()).began > job.submitted
    if status.complete or (newer and queued.get(job.number, "submitted") == "submitted"):
        return status
    if job.number in queued:
        return replace(status, state=queued[job.number])
    if not job.failed:
        stopped = "stopped" if job.code == STOPPED else "waiting"
        return replace(status, state=_trained_state(status.complete) if status.trained else stopped)
    words = last_words(*sorted(job.folder.glob("*.log")))
    how = "is gone without an exit code" if job.code is None else f"exit code {job.code}"
    failure = f"job {job.number}: {how}{', ' if words else ''}{words}"
    state = _trained_state(status.complete) if status.trained else "failed"
    return replace(status, state=state, failures=(*status.failures, failure))


def _trained_state(complete: bool) -> str:
    """Return the state of a trained run. complete: whether its evaluations are there too."""
    return "done" if complete else "trained"


def _step(run: PlannedRun) -> int:
    """Return the step of the last log line, 0 without one."""
    return last_step(run.folder / METRICS, "loss")


def _steps(run: PlannedRun) -> int:
    """Return all steps: those given, or as the run counted them for its budget of tokens (before it began, without
    padding)."""
    beat = read_beat(run.folder)
    return run.config.steps if beat is None or run.config.training.steps is not None else beat.steps
