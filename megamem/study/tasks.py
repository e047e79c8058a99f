"""The processes of a study's runs: trainings and readings, and the files that say they are done."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from megamem.config.load import read_yaml
from megamem.errors import RunFolderError
from megamem.runs.folder import held, locked
from megamem.runs.result import RESULT, read_result
from megamem.study.config import TRAINED, Changes, StudyConfig, readings_of
from megamem.study.grid import PlannedRun, study_folder

COMMAND = [sys.executable, "-m", "megamem"]
"""How a process is started."""
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
    change: Changes | None = None
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


def reading_file(run: PlannedRun, reading: str) -> Path:
    """Where a reading's figures lie; those of training are the run's own result."""
    return run.folder / (RESULT if reading == TRAINED else f"reading-{reading}.json")


def figures(run: PlannedRun, reading: str, change: Changes | None) -> dict[str, Any] | None:
    """What a training (`change` None) or a reading found; None if it has not ended, or was defined otherwise."""
    if change is None:
        result = read_result(run.folder)
        return None if result is None else result.to_dict()
    path = reading_file(run, reading)
    found = _object(path.read_text(encoding="utf-8")) if path.exists() else None
    return found if found is None or found.get(CHANGE) == plain(change) else None


def _object(text: str) -> dict[str, Any] | None:
    """None of what is no JSON object: a file that was cut short, words instead of figures."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


def check_begun(study: StudyConfig, runs: Sequence[PlannedRun]) -> None:
    """Raise RunFolderError where a folder holds a run that was begun with another configuration."""
    for run in runs:
        config = config_file(study, run)
        if config.exists() and run.folder.exists() and read_yaml(config) != plain(run.tree):
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

    Raises: RunFolderError where a folder holds a run that was begun with another configuration.
    """
    check_begun(study, runs)
    (study_folder(study) / LOGS).mkdir(parents=True, exist_ok=True)
    planned = []
    for run in runs:
        config = config_file(study, run)
        config.parent.mkdir(parents=True, exist_ok=True)
        config.write_text(yaml.safe_dump(plain(run.tree), sort_keys=False), encoding="utf-8")
        training = Task(run, TRAINED, ["train", str(config)], log_file(study, run, TRAINED))
        after = [
            Task(run, name, reading_command(run, change), log_file(study, run, name), change)
            for name, change in changes_of(study, run).items()
        ]
        planned.append((training, after))
    return planned


def changes_of(study: StudyConfig, run: PlannedRun) -> dict[str, Changes]:
    """What the readings of a run have different, by name."""
    return {name: reading.change for name, reading in readings_of(study, run.labels).items()}


def reading_command(run: PlannedRun, change: Changes) -> list[str]:
    """Verb and arguments: in training's precision, and on its device where the configuration names one."""
    how = ["--dtype", run.config.training.precision, "--json"]
    if run.config.parallel.device:
        how += ["--device", run.config.parallel.device]
    return ["evaluate", str(run.folder), *(f"{path}={json.dumps(value)}" for path, value in change.items()), *how]


def partial_file(task: Task) -> Path:
    """Where a reading's figures go until it has ended. Locked as long as the process lives that writes it."""
    return task.output.with_suffix(".partial")


def open_partial(task: Task) -> BinaryIO:
    """A new one, for standard output: the process inherits the lock with the file, and holds it after us."""
    partial_file(task).unlink(missing_ok=True)
    file = partial_file(task).open("wb")
    locked(file)
    return file


def elsewhere(task: Task) -> bool:
    """Whether a process writes the task's files that a queue which was killed left going on."""
    return (task.change is not None and held(partial_file(task))) or held(task.run.folder / "lock")


def keep_figures(task: Task) -> None:
    """Make the output of a reading that has ended its result, if its last line is one."""
    partial = partial_file(task)
    lines = partial.read_text(encoding="utf-8").splitlines()
    if lines and (found := _object(lines[-1])) is not None:
        partial.write_text(json.dumps({CHANGE: task.change, **found}) + "\n", encoding="utf-8")
        partial.replace(task.output)


def plain(tree: Mapping[str, Any]) -> Any:
    """The same in JSON's types."""
    return json.loads(json.dumps(tree))
