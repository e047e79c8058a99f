"""`megamem evaluate --suite`: the papers' benchmarks on a trained model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megamem.cli.output import console, write_json, write_line
from megamem.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from megamem.evaluation.suites.base import Suite
    from megamem.evaluation.suites.result import SuiteResult
    from megamem.hf.task_model import TaskModel

# as in megamem/config/evaluation.py, which takes long to import
NAMES = ("commonsense", "recall", "ruler", "longbench", "babilong", "perplexity")
DATA = Path("runs/tasks")


@dataclass(frozen=True)
class Reader:
    """How a model is read."""

    path: Path
    max_length: int | None
    rows: int
    dtype: torch.dtype
    device: torch.device
    transformers: bool

    def open(self, window: int | None) -> TaskModel:
        """Open the model. window: tokens of a window where none was given; those of its training if None."""
        from megamem.hf.task_model import open_task_model

        return open_task_model(
            self.path, self.max_length or window, self.rows, self.dtype, self.device, self.transformers
        )


@dataclass(frozen=True)
class Wanted:
    """What is asked for."""

    data: Path
    lengths: tuple[int, ...]
    limit: int | None
    only: tuple[str, ...]


def numbers(text: str | None) -> tuple[int, ...]:
    """Return the numbers of `4096,8192`. Raises ConfigError for other text."""
    parts = text.split(",") if text else []
    if bad := [part for part in parts if not part.strip().isdigit()]:
        raise ConfigError(f"--lengths {bad[0]!r}: expected numbers of tokens, separated by commas")
    return tuple(int(part) for part in parts)


def evaluate_suites(reader: Reader, names: Sequence[str], wanted: Wanted, as_json: bool) -> None:
    """Run suites on a model, keep their results in its run's folder, and print them."""
    from megamem.evaluation.suites.registry import SUITES
    from megamem.evaluation.suites.run import choose_suites

    for suite in choose_suites(names, SUITES):
        result = _evaluate(reader, suite, wanted, as_json)
        if as_json:
            write_json(result.to_dict())


def _evaluate(reader: Reader, suite: Suite, wanted: Wanted, as_json: bool) -> SuiteResult:
    """Run one suite and print its table."""
    from megamem.evaluation.suites.base import UNBOUNDED, Setting
    from megamem.evaluation.suites.result import suite_table, write_suite
    from megamem.evaluation.suites.run import open_suite

    opened = reader.open(UNBOUNDED if suite.whole else None)
    setting = Setting(opened.encode, opened.decode, wanted.data, wanted.lengths, wanted.limit, wanted.only)
    tasks = open_suite(suite, setting)
    result = tasks.run(opened.model, opened.title, opened.step)
    assert result is not None, "one process is the first of its host"
    if opened.run is not None:
        path = write_suite(opened.run, result)
    if not as_json:
        console.print(suite_table(result))
        for name, why in result.missing.items():
            write_line(f"missing: {name}: {why}")
        if opened.run is not None:
            write_line(f"kept in {path}")
    return result
