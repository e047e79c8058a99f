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
from megamem.errors import STOPPED, RunFolderError
from megamem.study.config import READING, TRAINED, Reading, StudyConfig, matches
from megamem.study.grid import PlannedRun, study_folder

COMMAND = [sys.executable, "-m", "megamem"]
RESULT = "result.json"
"""What a finished run leaves."""


@dataclass(eq=False)
class Task:
    """One process: a training, or a reading of a trained model."""

    run: PlannedRun
    reading: str
    command: list[str]
    output: Path
    """File that says it is done."""
    log: Path
    writes_stdout: bool = False
    """Whether `output` is the last line that the command prints."""
    failures: int = 0

    @property
    def name(self) -> str:
        """In messages."""
        return self.run.name if self.reading == TRAINED else f"{self.run.name}, {self.reading}"


@dataclass
class Outcome:
    """How a study's runs ended."""

    done: list[Task] = field(default_factory=list)
    failed: list[Task] = field(default_factory=list)
    stopped: bool = False


def reading_file(run: PlannedRun, reading: str) -> Path:
    """Where a reading's figures lie; those of training are the run's own result."""
    return run.folder / (RESULT if reading == TRAINED else f"reading-{reading}.json")


def tasks(study: StudyConfig, runs: Sequence[PlannedRun]) -> list[tuple[Task, list[Task]]]:
    """Each run's training and the readings that follow it. Writes each run's configuration beside the run folders.

    Raises: RunFolderError where a folder holds a run that was begun with another configuration.
    """
    configs, logs = (study_folder(study) / name for name in ("configs", "logs"))
    for folder in (configs, logs):
        folder.mkdir(parents=True, exist_ok=True)
    planned = []
    for run in runs:
        config = configs / f"{run.name}.yaml"
        if config.exists() and run.folder.exists() and read_yaml(config) != _plain(run.tree):
            raise RunFolderError(
                f"{run.folder}: was begun with another configuration than the study now gives ({config}); "
                "delete it, or give the study another name"
            )
        config.write_text(yaml.safe_dump(_plain(run.tree), sort_keys=False), encoding="utf-8")
        training = Task(run, TRAINED, ["train", str(config)], reading_file(run, TRAINED), logs / f"{run.name}.log")
        after = [
            Task(
                run,
                name,
                ["evaluate", str(run.folder), *_overrides(reading), "--json"],
                reading_file(run, name),
                logs / f"{run.name}-{name}.log",
                writes_stdout=True,
            )
            for name, reading in study.readings.items()
            if matches(reading.where, run.labels)
        ]
        planned.append((training, after))
    return planned


def _plain(tree: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(tree))


def _overrides(reading: Reading) -> list[str]:
    return [f"{path}={json.dumps(value)}" for path, value in reading.change.items()]


class Queue:
    """Starts tasks in order, at most `parallel` at a time; a reading waits for its training."""

    def __init__(self, study: StudyConfig, said: Callable[[str], None], moved: Callable[[int, int], None]) -> None:
        self.study, self.said, self.moved = study, said, moved
        self.outcome = Outcome()
        self.stopping = False

    def run(self, planned: Sequence[tuple[Task, list[Task]]]) -> Outcome:
        """Everything that is not done yet. On SIGTERM or SIGINT, runs save a checkpoint and the queue ends."""
        total = sum(1 + len(after) for _, after in planned)
        following = {id(training): after for training, after in planned}
        waiting: deque[Task] = deque()
        for training, after in planned:
            waiting.extend(self._remaining([training]) or self._remaining(after))
        running: dict[Task, tuple[subprocess.Popen[bytes], BinaryIO]] = {}
        with self._signals(running):
            while running or (waiting and not self.stopping):
                while waiting and len(running) < self.study.parallel and not self.stopping:
                    task = waiting.popleft()
                    running[task] = self._start(task)
                time.sleep(0.2)
                for task in [task for task, (job, _) in running.items() if job.poll() is not None]:
                    job, log = running.pop(task)
                    log.close()
                    if self._finished(task, job.returncode):
                        waiting.extendleft(reversed(self._remaining(following.get(id(task), []))))
                    elif not self.stopping and task.failures <= self.study.retries:
                        waiting.appendleft(task)
                    elif not self.stopping:
                        self.outcome.failed.append(task)
                        self.said(f"{task.name}: failed ({job.returncode}); see {task.log}")
                self.moved(len(self.outcome.done), total)
        self.outcome.stopped = self.stopping
        return self.outcome

    def _remaining(self, these: Sequence[Task]) -> list[Task]:
        """Those without a result; the others count as done."""
        self.outcome.done.extend(task for task in these if task.output.exists())
        return [task for task in these if not task.output.exists()]

    def _start(self, task: Task) -> tuple[subprocess.Popen[bytes], BinaryIO]:
        threads = max(1, (os.cpu_count() or 1) // self.study.parallel)
        log = task.log.open("ab")
        out: Any = task.output.with_suffix(".partial").open("wb") if task.writes_stdout else log
        job = subprocess.Popen(
            [*COMMAND, *task.command],
            stdout=out,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            start_new_session=True,  # a terminal's Ctrl-C reaches runs through this process only
        )
        if task.writes_stdout:
            out.close()
        return job, log

    def _finished(self, task: Task, code: int) -> bool:
        if code == 0 and task.writes_stdout:
            partial = task.output.with_suffix(".partial")
            lines = partial.read_text(encoding="utf-8").splitlines()
            partial.write_text(lines[-1] + "\n", encoding="utf-8")
            partial.replace(task.output)
        if code == 0 and task.output.exists():
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

        before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def records(study: StudyConfig, runs: Sequence[PlannedRun]) -> list[dict[str, Any]]:
    """One flat record per finished run and reading: labels, `reading`, and every number of its result."""
    found = []
    for run in runs:
        for reading in (TRAINED, *study.readings):
            path = reading_file(run, reading)
            if path.exists():
                figures = json.loads(path.read_text(encoding="utf-8"))
                numbers = {k: v for k, v in figures.items() if isinstance(v, int | float) and not isinstance(v, bool)}
                found.append({**run.labels, READING: reading, "run": run.name, **numbers})
    return found
