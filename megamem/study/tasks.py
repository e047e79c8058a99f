"""The processes of a study's runs, trainings and evaluations, and the files that show they are done."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from megamem.config.load import read_yaml
from megamem.config.yaml_text import to_yaml
from megamem.errors import RunFolderError
from megamem.files import try_lock, write_bytes
from megamem.runs.folder import held
from megamem.runs.result import RESULT, read_result
from megamem.study.config import TRAINED, Changes, StudyConfig, evaluations_of
from megamem.study.grid import PlannedRun, study_folder

COMMAND = [sys.executable, "-m", "megamem"]
"""The command of a process, without its arguments."""
LOGS = "logs"
"""Folder of the processes' output."""
CHANGE = "change"
"""Key of an evaluation's file: the changes that it was defined by, beside its figures."""
Figures = Mapping[str, object]
"""The result of a training or an evaluation, as its JSON file has it."""


@dataclass(eq=False)
class Task:
    """One process: a training, or an evaluation of a trained model."""

    run: PlannedRun
    evaluation: str
    command: list[str]
    log: Path
    change: Changes | None = None
    """Values by dotted key in which an evaluation's configuration differs; None for a training."""
    failures: int = 0
    """Number of times that it failed."""

    @property
    def name(self) -> str:
        """Name in messages."""
        return self.run.name if self.change is None else f"{self.run.name}, {self.evaluation}"

    @property
    def output(self) -> Path:
        """File that shows that it is done."""
        return evaluation_file(self.run, self.evaluation)

    @property
    def done(self) -> bool:
        """Whether its figures are there; those of an evaluation under the same definition."""
        return figures(self.run, self.evaluation, self.change) is not None


def evaluation_file(run: PlannedRun, evaluation: str) -> Path:
    """Return the file of an evaluation's figures; those of training are the run's own result."""
    return run.folder / (RESULT if evaluation == TRAINED else f"evaluation-{evaluation}.json")


def figures(run: PlannedRun, evaluation: str, change: Changes | None) -> Figures | None:
    """Return the figures of a training (`change` None) or an evaluation.

    Returns: None if it has not ended, the run has been made longer since, or it was defined by other changes.
    """
    result = read_result(run.folder)
    if change is None:
        return None if result is None or goes_on(run) else result.to_dict()
    path = evaluation_file(run, evaluation)
    if goes_on(run) or not path.exists() or _older(path, evaluation_file(run, TRAINED)):
        return None
    found = _object(path.read_text(encoding="utf-8"))
    return found if found is None or found.get(CHANGE) == plain(change) else None


def goes_on(run: PlannedRun) -> bool:
    """Return whether a run has ended, but has been made longer since."""
    result = read_result(run.folder)
    return result is not None and result.steps < (run.config.training.steps or 0)


def _older(path: Path, result: Path) -> bool:
    """Return whether a file was written before the run's result: of a model that has gone on learning since."""
    return result.exists() and path.stat().st_mtime_ns < result.stat().st_mtime_ns


def _object(text: str) -> dict[str, object] | None:
    """Return a JSON object, None where the text is none: a file that was cut short, or words instead of figures."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


def check_begun(study: StudyConfig, runs: Sequence[PlannedRun]) -> None:
    """Raise RunFolderError where a folder holds a run that was begun with another configuration.

    More steps are no other configuration: the run goes on.
    """
    for run in runs:
        config = config_file(study, run)
        if not (config.exists() and run.folder.exists()):
            continue
        begun, now = read_yaml(config), plain(run.tree)
        if begun != now and not _made_longer(begun, now):
            raise RunFolderError(
                f"{run.folder}: was begun with another configuration than the study now gives ({config}); "
                "delete it, or give the study another name"
            )


def _made_longer(begun: Any, now: Any) -> bool:
    """Return whether two configurations differ in nothing but more steps of the later one."""
    steps, more = begun.get("training", {}).get("steps"), now.get("training", {}).get("steps")
    if steps is None or more is None or more <= steps:
        return False
    return bool(now == {**begun, "training": {**begun["training"], "steps": more}})


def config_file(study: StudyConfig, run: PlannedRun) -> Path:
    """Return the file of a run's configuration."""
    return study_folder(study) / "configs" / f"{run.name}.yaml"


def log_file(study: StudyConfig, run: PlannedRun, evaluation: str) -> Path:
    """Return the file of the output of a training or an evaluation."""
    return study_folder(study) / LOGS / (f"{run.name}.log" if evaluation == TRAINED else f"{run.name}-{evaluation}.log")


def tasks(study: StudyConfig, runs: Sequence[PlannedRun]) -> list[tuple[Task, list[Task]]]:
    """Return each run's training and the evaluations that follow it, and write each run's configuration file.

    Raises: RunFolderError where a folder holds a run that was begun with another configuration.
    """
    check_begun(study, runs)
    (study_folder(study) / LOGS).mkdir(parents=True, exist_ok=True)
    planned = []
    for run in runs:
        config = config_file(study, run)
        write_bytes(config, to_yaml(plain(run.tree)).encode())
        training = Task(run, TRAINED, ["train", str(config)], log_file(study, run, TRAINED))
        after = [
            Task(run, name, evaluation_command(run, change), log_file(study, run, name), change)
            for name, change in changes_of(study, run).items()
        ]
        planned.append((training, after))
    return planned


def changes_of(study: StudyConfig, run: PlannedRun) -> dict[str, Changes]:
    """Return the changes of a run's evaluations, by name."""
    return {name: evaluation.change for name, evaluation in evaluations_of(study, run.labels).items()}


def evaluation_command(run: PlannedRun, change: Changes) -> list[str]:
    """Return verb and arguments of an evaluation, in training's precision and on its device if the run names one."""
    options = ["--dtype", run.config.training.precision, "--json"]
    if run.config.parallel.device:
        options += ["--device", run.config.parallel.device]
    return ["evaluate", str(run.folder), *(f"{path}={json.dumps(value)}" for path, value in change.items()), *options]


def partial_file(task: Task) -> Path:
    """Return the file of an evaluation's output until it has ended, locked by the process that writes it."""
    return task.output.with_suffix(".partial")


def open_partial(task: Task) -> BinaryIO:
    """Open a new partial file as standard output of a process, which inherits the lock and may outlive this one."""
    partial_file(task).unlink(missing_ok=True)
    file = partial_file(task).open("wb")
    try_lock(file)
    return file


def written_elsewhere(task: Task) -> bool:
    """Return whether another process writes the task's files, such as one that a killed queue left behind."""
    return (task.change is not None and held(partial_file(task))) or held(task.run.folder / "lock")


def keep_figures(task: Task) -> None:
    """Make the output of an evaluation that has ended its result, if its last line has the figures."""
    partial = partial_file(task)
    lines = partial.read_text(encoding="utf-8").splitlines()
    if lines and (found := _object(lines[-1])) is not None:
        partial.write_text(json.dumps({CHANGE: task.change, **found}) + "\n", encoding="utf-8")
        partial.replace(task.output)


def plain(tree: Mapping[str, object]) -> object:
    """Return a tree in JSON's types, as a file has it: lists for tuples."""
    converted: object = json.loads(json.dumps(tree))
    return converted
