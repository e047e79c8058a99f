"""Where each run of a study stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megamem.evaluation.metrics import read_points
from megamem.evaluation.report import METRICS
from megamem.study.config import TRAINED, StudyConfig, readings_of
from megamem.study.grid import PlannedRun, study_folder
from megamem.study.journal import History, last_words, read_journal
from megamem.study.queue import figures, log_file


@dataclass(frozen=True)
class RunState:
    """Of a training and the readings after it."""

    run: PlannedRun
    state: str
    """`done`, `failed`, `stopped` (by a signal, with a checkpoint), `begun` (running, or killed), `waiting`."""
    step: int
    """Of the last log line; all of them once it is done."""
    seconds: float
    """That its processes took, readings included, as far as the queue saw their ends."""
    readings: tuple[int, int]
    """How many are done, of how many."""
    failures: tuple[str, ...]
    """What failed for good or last, each in one line."""


def run_states(study: StudyConfig, runs: Sequence[PlannedRun]) -> list[RunState]:
    """All runs in the study's order."""
    journal = read_journal(study_folder(study))
    return [_state(study, run, journal) for run in runs]


def _state(study: StudyConfig, run: PlannedRun, journal: dict[tuple[str, str], History]) -> RunState:
    readings = {name: reading.change for name, reading in readings_of(study, run.labels).items()}
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
    )


def _step(run: PlannedRun) -> int:
    points = read_points(run.folder / METRICS, "loss")
    return int(points[-1][0] // run.config.training.batch_tokens) if points else 0
