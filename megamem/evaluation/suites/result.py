"""What a suite finds: a score with its standard error for each task, as a table and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from megamem.errors import DataError
from megamem.evaluation.report import finite
from megamem.files import read_json, write_json

FOLDER = "suites"
"""Folder of results in a run's folder."""
NOT_ASKED = "not asked yet"
"""Why a task is missing while its suite is being asked."""


@dataclass(frozen=True)
class TaskScore:
    """The figure of one task."""

    task: str
    metric: str
    value: float
    """The mean over documents in percent; perplexities as they are, infinity where they are beyond a float."""
    stderr: float | None
    """Its standard error over documents; None for a single document."""
    documents: int


@dataclass(frozen=True)
class SuiteResult:
    """The figures of one suite."""

    suite: str
    model: str
    """What was read with, for people."""
    scores: tuple[TaskScore, ...]
    missing: Mapping[str, str]
    """Why tasks are not there, by name."""
    limit: int | None
    """Documents of each task at most."""
    averaged: bool
    """Whether the mean over tasks is a figure."""
    seconds: float
    differs: str = ""
    """What was asked less or otherwise than the whole suite, such as `only-arc-limit-20`; nothing if empty."""
    independent: bool = True
    """Whether tasks ask documents of their own: the same at several lengths tell nothing of the mean's error."""
    step: int | None = None
    """Optimizer steps of the model, where it is known."""

    @property
    def unfinished(self) -> bool:
        """Whether tasks are still to be asked."""
        return NOT_ASKED in self.missing.values()

    @property
    def average(self) -> float | None:
        """The mean over tasks; None where one is missing."""
        if not self.averaged or self.missing or len(self.scores) < 2:
            return None
        return sum(score.value for score in self.scores) / len(self.scores)

    @property
    def average_stderr(self) -> float | None:
        """The standard error of the mean over tasks; None where their documents are not independent."""
        errors = [score.stderr for score in self.scores if score.stderr is not None]
        if self.average is None or not self.independent or len(errors) < len(self.scores):
            return None
        return math.sqrt(sum(error**2 for error in errors)) / len(errors)

    @property
    def asked(self) -> str:
        """What was asked in the place of the whole suite, for people; nothing if empty."""
        if self.differs in ("", f"limit-{self.limit}"):
            return "" if self.limit is None else f"at most {self.limit} documents of each task"
        return f"asked {self.differs}"

    def figures(self) -> dict[str, float]:
        """Return the single numbers by name, such as `commonsense.hellaswag.acc_norm` and `commonsense.average`."""
        found = {f"{self.suite}.{score.task}.{score.metric}": score.value for score in self.scores}
        return found if self.average is None else {**found, f"{self.suite}.average": self.average}

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON, which has no word for infinity: it is None."""
        return finite({
            "suite": self.suite, "model": self.model, "step": self.step, "limit": self.limit, "seconds": self.seconds,
            "averaged": self.averaged, "average": self.average, "average_stderr": self.average_stderr,
            "differs": self.differs, "independent": self.independent,
            "scores": [vars(score) for score in self.scores], "missing": dict(self.missing),
        })  # fmt: skip

    @staticmethod
    def from_dict(value: Mapping[str, Any]) -> SuiteResult:
        """Return the result that `to_dict` gave. Raises KeyError or TypeError for other data."""
        scores = [{**score, "value": math.inf} if score["value"] is None else score for score in value["scores"]]
        return SuiteResult(
            suite=value["suite"], model=value["model"], scores=tuple(TaskScore(**score) for score in scores),
            missing=value["missing"], limit=value["limit"], averaged=value["averaged"], seconds=value["seconds"],
            differs=value["differs"], independent=value["independent"], step=value["step"],
        )  # fmt: skip

    def line(self) -> str:
        """Return the most important figures in one line."""
        shown = [("average", self.average, self.average_stderr)] if self.average is not None else []
        shown = shown or [(score.task, score.value, score.stderr) for score in self.scores[:3]]
        more = "" if self.average is not None or len(self.scores) <= 3 else f" and {len(self.scores) - 3} more"
        step = "" if self.step is None else f", step {self.step}"
        asked = f", {self.asked}" if self.asked else ""
        if self.unfinished:
            asked += f", {len(self.scores)} of {len(self.scores) + len(self.missing)} tasks so far"
        return ", ".join(f"{name} {with_error(value, error)}" for name, value, error in shown) + more + step + asked


def with_error(value: float, stderr: float | None) -> str:
    """Write a figure with its standard error."""
    return f"{value:.2f}" if stderr is None else f"{value:.2f} ± {stderr:.2f}"


def suite_table(result: SuiteResult) -> Table:
    """Return a suite's table: a line for each task that was asked, and one for the mean."""
    table = Table(title=f"{result.suite}: {result.model}{f', {result.asked}' if result.asked else ''}")
    for name in ("task", "metric"):
        table.add_column(name, no_wrap=True)
    for name in ("score", "documents"):
        table.add_column(name, justify="right", no_wrap=True)
    for score in result.scores:
        table.add_row(score.task, score.metric, with_error(score.value, score.stderr), f"{score.documents:,}")
    if result.average is not None:
        table.add_row("average", "", with_error(result.average, result.average_stderr), "", style="bold")
    return table


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and its standard error, from the deviation of a sample; None for a single value."""
    array = np.asarray(values, np.float64)
    error = None if len(array) < 2 else float(array.std(ddof=1) / math.sqrt(len(array)))
    return float(array.mean()), error


def ratio_and_error(sums: Sequence[float], weights: Sequence[float]) -> tuple[float, float | None]:
    """Return the sum of `sums` over that of `weights` and its standard error by the delta method.

    Such as nats over words: documents are the independent draws.
    """
    top, below = np.asarray(sums, np.float64), np.asarray(weights, np.float64)
    ratio = float(top.sum() / below.sum())
    if len(top) < 2:
        return ratio, None
    rests = top - ratio * below
    return ratio, float(math.sqrt(len(top)) * rests.std(ddof=1) / below.sum())


def write_suite(folder: Path, result: SuiteResult) -> Path:
    """Write a result to `suites/NAME-step-N.json` in a run's folder, whole or not at all, and return its path.

    What was asked less or otherwise is kept apart from the whole suite: `NAME-limit-20-step-N.json`; and so is what is
    not finished, until it is: `NAME-step-N-unfinished.json`.
    """
    step = "" if result.step is None else f"step-{result.step}"
    name = "-".join(part for part in (result.suite, result.differs, step) if part)
    path, unfinished = (folder / FOLDER / f"{name}{ending}.json" for ending in ("", "-unfinished"))
    path = unfinished if result.unfinished else path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, result.to_dict())
        if path != unfinished:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror or error})") from None
    return path


def read_suites(folder: Path) -> list[SuiteResult]:
    """Return the results in a run's folder by name, of each that of the most steps; damaged ones are left out.

    One that is not finished is shown too if it is of more steps.
    """
    found = []
    for path in (folder / FOLDER).glob("*.json"):
        try:
            found.append(SuiteResult.from_dict(read_json(path)))
        except (OSError, ValueError, KeyError, TypeError, DataError):
            continue
    shown: dict[tuple[str, str], list[SuiteResult]] = {}
    for result in sorted(found, key=lambda each: (-1 if each.step is None else each.step, not each.unfinished)):
        name = result.suite, result.differs
        kept = [each for each in shown.get(name, ()) if result.unfinished and not each.unfinished]
        shown[name] = [*kept, result]
    return [result for name in sorted(shown) for result in shown[name]]
