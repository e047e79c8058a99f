"""Run a study on this machine: so many runs at a time, each in a process of its own, gone on with where it stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from megamem.config.load import read_yaml
from megamem.errors import FINAL, STOPPED, RunFolderError
from megamem.study.config import TRAINED, Reading, StudyConfig, readings_of
from megamem.study.grid import PlannedRun, study_folder
from megamem.study.journal import Journal
from megamem.training.run_folder import RunLock

COMMAND = [sys.executable, "-m", "megamem"]
RESULT = "result.json"
"""What a finished run leaves."""
LOGS = "logs"
"""Folder of the processes' output."""
CHANGE = "change"
"""Beside a reading's figures: how it was defined."""


@dataclass(eq=False)
class Task:
    """One process: a training, or a reading of a trained model."""

    run: PlannedRun
    reading: str
    command: list[str]
    log: Path
    change: Mapping[str, Any] | None = None
    """What a reading's configuration has different; None of a training."""
    failures: int = 0

    @property
    def name(self) -> str:
        """In messages."""
        return self.run.name if self.change is None else f"{self.run.name}, {self.reading}"

    @property
    def output(self) -> Path:
        """File that says it is done."""
        return reading_file(self.run, self.reading)

    @property
    def done(self) -> bool:
        """Whether its figures are there, a reading's under the same definition."""
        return figures(self.run, self.reading, self.change) is not None


@dataclass
class Outcome:
    """How a study's runs ended."""

    done: list[Task] = field(default_factory=list)
    failed: list[Task] = field(default_factory=list)
    stopped: bool = False


def reading_file(run: PlannedRun, reading: str) -> Path:
    """Where a reading's figures lie; those of training are the run's own result."""
    return run.folder / (RESULT if reading == TRAINED else f"reading-{reading}.json")


def figures(run: PlannedRun, reading: str, change: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What a training (`change` None) or a reading found; None if it has not ended, or was defined otherwise."""
    path = reading_file(run, reading)
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found if change is None or found.get(CHANGE) == _plain(change) else None


def check_begun(study: StudyConfig, runs: Sequence[PlannedRun]) -> None:
    """Raise RunFolderError where a folder holds a run that was begun with another configuration."""
    for run in runs:
        config = config_file(study, run)
        if config.exists() and run.folder.exists() and read_yaml(config) != _plain(run.tree):
            raise RunFolderError(
                f"{run.folder}: was begun with another configuration than the study now gives ({config}); "
                "delete it, or give the study another name"
            )


def config_file(study: StudyConfig, run: PlannedRun) -> Path:
    """Where a run's configuration lies."""
    return study_folder(study) / "configs" / f"{run.name}.yaml"


def log_file(study: StudyConfig, run: PlannedRun, reading: str) -> Path:
    """Where the output of a training or a reading goes."""
    return study_folder(study) / LOGS / (f"{run.name}.log" if reading == TRAINED else f"{run.name}-{reading}.log")


def tasks(study: StudyConfig, runs: Sequence[PlannedRun]) -> list[tuple[Task, list[Task]]]:
    """Each run's training and the readings that follow it. Writes each run's configuration beside the run folders.

    Readings compute in training's precision, and on its device where the configuration names one.
    Raises: RunFolderError where a folder holds a run that was begun with another configuration.
    """
    check_begun(study, runs)
    (study_folder(study) / LOGS).mkdir(parents=True, exist_ok=True)
    planned = []
    for run in runs:
        config = config_file(study, run)
        config.parent.mkdir(parents=True, exist_ok=True)
        config.write_text(yaml.safe_dump(_plain(run.tree), sort_keys=False), encoding="utf-8")
        how = ["--dtype", run.config.training.precision, "--json"]
        if run.config.parallel.device:
            how += ["--device", run.config.parallel.device]
        training = Task(run, TRAINED, ["train", str(config)], log_file(study, run, TRAINED))
        after = [
            Task(
                run,
                name,
                ["evaluate", str(run.folder), *_overrides(reading), *how],
                log_file(study, run, name),
                reading.change,
            )
            for name, reading in readings_of(study, run.labels).items()
        ]
        planned.append((training, after))
    return planned


def _plain(tree: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(tree))


def _overrides(reading: Reading) -> list[str]:
    return [f"{path}={json.dumps(value)}" for path, value in reading.change.items()]


def study_lock(study: StudyConfig) -> RunLock:
    """The study to itself, once taken. Its `take` raises RunFolderError while another process runs the study."""
    return RunLock(study_folder(study), "another process is running this study")


class Queue:
    """Starts tasks in order, at most `parallel` at a time; a reading waits for its training."""

    def __init__(self, study: StudyConfig, said: Callable[[str], None], moved: Callable[[int, int], None]) -> None:
        self.study, self.said, self.moved = study, said, moved
        self.outcome = Outcome()
        self.journal = Journal(study_folder(study))
        self.stopping = False
        self.told: set[Task] = set()
        """Tasks that were said to wait for another process."""

    def run(self, runs: Sequence[PlannedRun]) -> Outcome:
        """Everything that is not done yet. On SIGTERM or SIGINT, runs save a checkpoint and the queue ends.

        Raises: RunFolderError while another process runs the study, or as `tasks`; nothing is written then.
        """
        with study_lock(self.study) as lock:
            lock.take()
            return self._run(tasks(self.study, runs))

    def _run(self, planned: Sequence[tuple[Task, list[Task]]]) -> Outcome:
        total = sum(1 + len(after) for _, after in planned)
        following = {id(training): after for training, after in planned}
        waiting: deque[Task] = deque()
        for training, after in planned:
            waiting.extend(self._remaining([training]) or self._remaining(after))
        running: dict[Task, tuple[subprocess.Popen[bytes], BinaryIO]] = {}
        with self._signals(running):
            while running or (waiting and not self.stopping):
                while len(running) < self.study.parallel and not self.stopping and (task := self._next(waiting)):
                    running[task] = self._start(task)
                    self.journal.began(task.run.name, task.reading)
                    if self.stopping:  # the signal came while it was started
                        running[task][0].send_signal(signal.SIGTERM)
                time.sleep(0.2)
                for task in [task for task, (job, _) in running.items() if job.poll() is not None]:
                    job, log = running.pop(task)
                    log.close()
                    self.journal.ended(task.run.name, task.reading, job.returncode)
                    if self._finished(task, job.returncode):
                        waiting.extendleft(reversed(self._remaining(following.get(id(task), []))))
                    elif not self.stopping and task.failures <= self.study.retries and job.returncode not in FINAL:
                        waiting.appendleft(task)
                    elif not self.stopping:
                        self.outcome.failed.append(task)
                        self.said(f"{task.name}: failed ({job.returncode}); see {task.log}")
                self.moved(len(self.outcome.done), total)
        self.outcome.stopped = self.stopping
        return self.outcome

    def _next(self, waiting: deque[Task]) -> Task | None:
        """Take the first task whose run nobody writes: a queue that was killed leaves its runs going on."""
        for task in waiting:
            try:
                if (task.run.folder / "lock").exists():
                    with RunLock(task.run.folder) as lock:
                        lock.take()
            except RunFolderError:
                if task not in self.told:
                    self.told.add(task)
                    self.said(f"{task.name}: waits for the end of another process that writes {task.run.folder}")
                continue
            waiting.remove(task)
            return task
        return None

    def _remaining(self, these: Sequence[Task]) -> list[Task]:
        """Those without a result; the others count as done."""
        self.outcome.done.extend(task for task in these if task.done)
        return [task for task in these if not task.done]

    def _start(self, task: Task) -> tuple[subprocess.Popen[bytes], BinaryIO]:
        ranks = task.run.config.parallel
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        share = cores // (self.study.parallel * ranks.tp * ranks.pp * (ranks.dp or 1))
        log = task.log.open("ab")
        partial = task.output.with_suffix(".partial")
        partial.unlink(missing_ok=True)  # a reading that a killed queue left behind writes to the old one
        out: Any = log if task.change is None else partial.open("wb")
        job = subprocess.Popen(
            [*COMMAND, *task.command],
            stdout=out,
            stderr=log,
            env={"OMP_NUM_THREADS": str(max(1, share)), **os.environ},
            start_new_session=True,  # a terminal's Ctrl-C reaches runs through this process only
        )
        if task.change is not None:
            out.close()
        return job, log

    def _finished(self, task: Task, code: int) -> bool:
        if code == 0 and task.change is not None:
            partial = task.output.with_suffix(".partial")
            lines = partial.read_text(encoding="utf-8").splitlines()
            if lines:
                found = {CHANGE: task.change, **json.loads(lines[-1])}
                partial.write_text(json.dumps(found) + "\n", encoding="utf-8")
                partial.replace(task.output)
        if code == 0 and task.done:
            self.outcome.done.append(task)
            self.said(f"{task.name}: done")
            return True
        if not (self.stopping and code == STOPPED):
            task.failures += 1
        return False

    @contextmanager
    def _signals(self, running: Mapping[Task, tuple[subprocess.Popen[bytes], BinaryIO]]) -> Iterator[None]:
        def stop(number: int, frame: object) -> None:
            self.stopping = True
            for job, _ in list(running.values()):
                job.send_signal(signal.SIGTERM)

        before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
        try:
            yield
        finally:
            for job, _ in running.values():  # only if something went wrong here
                job.send_signal(signal.SIGTERM)
                job.wait()
            for number, handler in before.items():
                signal.signal(number, handler)
