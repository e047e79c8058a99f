"""Where each run of a study stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from launchers.slurm_jobs import NUMBER, SlurmJob, in_queue, slurm_jobs
from megamem.errors import STOPPED, MegamemError
from megamem.evaluation.metrics import read_points
from megamem.evaluation.report import METRICS
from megamem.study.config import TRAINED, StudyConfig
from megamem.study.grid import PlannedRun, study_folder
from megamem.study.journal import History, last_words, read_journal
from megamem.study.tasks import changes_of, figures, log_file


@dataclass(frozen=True)
class RunState:
    """Of a training and the readings after it."""

    run: PlannedRun
    state: str
    """`done`, `failed`, `stopped` (by a signal, with a checkpoint), `begun` (running, or killed), `waiting`. Of a job
    that SLURM has not done with, readings included: `queued`, `running`; `submitted` where SLURM cannot be asked."""
    step: int
    """Of the last log line; all of them once it is done."""
    seconds: float
    """That its processes took, readings included, as far as the queue saw their ends."""
    readings: tuple[int, int]
    """How many are done, of how many."""
    failures: tuple[str, ...]
    """What failed for good or last, each in one line."""
    jobs: tuple[SlurmJob, ...] = ()
    """That it was submitted as, oldest first."""

    @property
    def trained(self) -> bool:
        """Whether the training has its result."""
        return figures(self.run, TRAINED, None) is not None

    @property
    def complete(self) -> bool:
        """Whether the readings have theirs too."""
        return self.trained and self.readings[0] == self.readings[1]

    @property
    def in_queue(self) -> bool:
        """Whether SLURM has not done with it, as far as is known."""
        return self.state in ("queued", "running", "submitted")


def run_states(study: StudyConfig, runs: Sequence[PlannedRun], sure: bool = False) -> list[RunState]:
    """All runs in the study's order. sure: raise MegamemError if SLURM is needed and does not answer."""
    journal = read_journal(study_folder(study))
    states = [_state(study, run, journal) for run in runs]
    at = _in_queue([state.jobs[-1] for state in states if state.jobs and not state.complete], sure)
    return [_with_job(state, journal, at) if state.jobs else state for state in states]


def _state(study: StudyConfig, run: PlannedRun, journal: Mapping[tuple[str, str], History]) -> RunState:
    """As far as the queue of this machine knows."""
    readings = changes_of(study, run)
    done, failures, seconds = [], [], 0.0
    for reading, change in {TRAINED: None, **readings}.items():
        history = journal.get((run.name, reading), History())
        seconds += history.seconds
        if figures(run, reading, change) is not None:
            done.append(reading)
        elif history.state in ("failed", "ended"):
            words = last_words(log_file(study, run, reading))
            failures.append(f"{reading}: exit code {history.code}{', ' if words else ''}{words}")
    trained = TRAINED in done
    last = journal.get((run.name, TRAINED), History()).state
    return RunState(
        run,
        "done" if trained else "failed" if last == "ended" else last,
        run.config.steps if trained else _step(run),
        seconds,
        (len(done) - trained, len(readings)),
        tuple(failures),
        tuple(slurm_jobs(run.folder)),
    )


def _in_queue(jobs: Sequence[SlurmJob], sure: bool) -> dict[str, str]:
    if sure and (lost := next((job for job in jobs if not job.number), None)):
        raise MegamemError(
            f"{lost.folder / NUMBER}: is empty, so SLURM may have the job; write its number there "
            "(squeue --me shows it), or remove the file if there is none"
        )
    try:
        return {**in_queue([job.number for job in jobs if job.number]), "": "submitted"}
    except MegamemError:
        if sure:
            raise
        return {job.number: "submitted" for job in jobs if job.code is None}


def _with_job(state: RunState, journal: Mapping[tuple[str, str], History], at: Mapping[str, str]) -> RunState:
    """What the run's last job says of it; `state` if a process of this machine is newer than that job was."""
    job = state.jobs[-1]
    newer = journal.get((state.run.name, TRAINED), History()).began > job.submitted
    if state.complete or (newer and at.get(job.number, "submitted") == "submitted"):
        return state
    if job.number in at:
        return replace(state, state=at[job.number])
    if not job.failed:
        stopped = "stopped" if job.code == STOPPED else "waiting"
        return replace(state, state="done" if state.trained else stopped)
    words = last_words(*sorted(job.folder.glob("*.log")))
    how = "is gone without an exit code" if job.code is None else f"exit code {job.code}"
    failure = f"job {job.number}: {how}{', ' if words else ''}{words}"
    return replace(state, state="done" if state.trained else "failed", failures=(*state.failures, failure))


def _step(run: PlannedRun) -> int:
    points = read_points(run.folder / METRICS, "loss")
    return int(points[-1][0] // run.config.training.batch_tokens) if points else 0
