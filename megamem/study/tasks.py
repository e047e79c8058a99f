"""The processes of a study's runs, trainings and evaluations, and the files that show they are done."""

from __future__ import annotations

import json
import math
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
STEPS, PLACE = "training.steps", "runs_folder"
"""Keys of a run's configuration that may change after it has begun: more steps, another folder."""
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

    More steps are no other configuration: the run goes on. Nor is another place: studies may be moved.
    """
    for run in runs:
        config = config_file(study, run)
        if not (config.exists() and run.folder.exists()):
            continue
        begun, now = (flattened({**tree, PLACE: None}) for tree in (read_yaml(config), plain(run.tree)))
        differing = [key for key in sorted(begun.keys() | now.keys()) if begun.get(key) != now.get(key)]
        if not differing or (differing == [STEPS] and (now.get(STEPS) or 0) > (begun.get(STEPS) or math.inf)):
            continue
        key = next((key for key in differing if key != STEPS), STEPS)
        raise RunFolderError(
            f"{run.folder}: was begun with another configuration ({config}): {key} was {json.dumps(begun.get(key))}, "
            f"the study now gives {json.dumps(now.get(key))}; change it back, or give the study another name"
        )


def flattened(tree: Mapping[str, object], above: str = "") -> dict[str, Any]:
    """Return the values of a configuration by dotted key; lists are values."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            found |= flattened(value, f"{above}{key}.")
        else:
            found[f"{above}{key}"] = value
    return found


def config_file(study: StudyConfig, run: PlannedRun) -> Path:
    """Return the file of a run's configuration."""
    return study_folder(study) / "configs" / f"{run.name}.yaml"


def log_file(study: StudyConfig, run: PlannedRun, evaluation: str) -> Path:
    """Return the file of the output of a training or an evaluation."""
    return study_folder(study) / LOGS / (f"{run.name}.log" if evaluation == TRAINED else f"{run.name}-{evaluation}.log")


def tasks(study: StudyConfig, runs: Sequence[PlannedRun]) -> list[tuple[Task, list[Task]]]:
    """Return each run's training and the evaluations that follow it. Nothing of a run is written yet.

    Raises: RunFolderError where a folder holds a run that was begun with another configuration.
    """
    check_begun(study, runs)
    (study_folder(study) / LOGS).mkdir(parents=True, exist_ok=True)
    planned = []
    for run in runs:
        training = Task(run, TRAINED, ["train", str(config_file(study, run))], log_file(study, run, TRAINED))
        after = [
            Task(run, name, evaluation_command(run, change), log_file(study, run, name), change)
            for name, change in changes_of(study, run).items()
        ]
        planned.append((training, after))
    return planned


def write_config(study: StudyConfig, run: PlannedRun) -> None:
    """Write the configuration of a run that begins or goes on now: what later calls are compared with."""
    write_bytes(config_file(study, run), to_yaml(plain(run.tree)).encode())


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
    """Open a new partial file as standard output of a process, which inherits the lock and may outlive this one.

    Its first line says what is evaluated, for whoever finds it finished.
    """
    partial_file(task).unlink(missing_ok=True)
    file = partial_file(task).open("wb")
    try_lock(file)
    file.write(f"{json.dumps({CHANGE: task.change})}\n".encode())
    file.flush()
    return file


def written_elsewhere(task: Task) -> bool:
    """Return whether another process writes the task's files, such as one that a killed queue left behind."""
    # a training takes the run's own lock when it has come so far, its log from the first moment on
    files = [task.log if task.change is None else partial_file(task), task.run.folder / "lock"]
    return any(held(file) for file in files)


def keep_figures(task: Task) -> None:
    """Make the output of an evaluation that has ended its result, if its last line has the figures.

    Of one that a killed queue left behind too; not of another evaluation, nor of a model that has gone on learning.
    """
    partial = partial_file(task)
    if not partial.exists() or _older(partial, evaluation_file(task.run, TRAINED)):
        return
    first, *lines = [_object(line) for line in partial.read_text(encoding="utf-8", errors="replace").splitlines()] or [
        None
    ]
    if first != {CHANGE: plain(task.change or {})} or not lines or lines[-1] is None:
        return
    partial.write_text(json.dumps({**first, **lines[-1]}) + "\n", encoding="utf-8")
    partial.replace(task.output)


def plain(tree: Mapping[str, object]) -> dict[str, Any]:
    """Return a tree in JSON's types, as a file has it: lists for tuples."""
    converted: dict[str, Any] = json.loads(json.dumps(tree))
    return converted
