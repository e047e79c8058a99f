"""`megamem evaluate --suite`: the papers' benchmarks on a trained model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megamem.cli.compute import Place
from megamem.cli.output import console, write_json, write_line
from megamem.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from megamem.evaluation.reading import Progress
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
    place: Place
    transformers: bool

    def open(self, window: int | None, progress: Progress | None = None) -> TaskModel:
        """Open the model.

        window: tokens of a window where none was given; those of its training if None.
        progress: told how many batches of requests are done.
        """
        from megamem.hf.task_model import open_task_model

        return open_task_model(
            self.path, self.max_length or window, self.rows, self.dtype, self.place.device, self.transformers,
            progress, self.place.topology,
        )  # fmt: skip


@dataclass(frozen=True)
class Wanted:
    """What is asked for."""

    data: Path
    lengths: tuple[int, ...]
    limit: int | None
    only: tuple[str, ...]


def names(text: str | None) -> tuple[str, ...]:
    """Return the names of `arc,piqa`."""
    return () if text is None else tuple(name.strip() for name in text.split(","))


def numbers(text: str | None) -> tuple[int, ...]:
    """Return the numbers of `4096,8192`. Raises ConfigError for other text."""
    parts = text.split(",") if text else []
    if bad := [part for part in parts if not part.strip().isdigit()]:
        raise ConfigError(f"--lengths {bad[0]!r}: expected numbers of tokens, separated by commas")
    return tuple(int(part) for part in parts)


def evaluate_suites(reader: Reader, names: Sequence[str], wanted: Wanted, as_json: bool) -> None:
    """Run suites on a model; rank 0 keeps their results in the run's folder, and prints them."""
    from megamem.evaluation.run import Passes
    from megamem.evaluation.suites.registry import SUITES
    from megamem.evaluation.suites.run import choose_suites
    from megamem.training.devices import is_rank_0

    shown = console if is_rank_0() and not as_json else None
    for suite in choose_suites(names, SUITES, wanted.only, wanted.lengths):
        with Passes(shown) as passes:
            opened, result = _evaluate(reader, suite, wanted, passes.named(suite.name))
        if not is_rank_0():
            continue
        path = _keep(opened, result)
        if as_json:
            write_json(result.to_dict())
        else:
            _show(result, path)


def _evaluate(reader: Reader, suite: Suite, wanted: Wanted, progress: Progress) -> tuple[TaskModel, SuiteResult]:
    """Run one suite; rank 0 keeps what is known after each task."""
    from megamem.evaluation.suites.base import UNBOUNDED, Setting
    from megamem.evaluation.suites.run import open_suite, open_suite_everywhere
    from megamem.training.devices import is_rank_0

    opened = reader.open(UNBOUNDED if suite.whole else None, progress)
    setting = Setting(
        opened.encode, opened.decode, wanted.data, wanted.lengths, wanted.limit, wanted.only, reader.max_length
    )
    keep = partial(_keep, opened) if is_rank_0() else None
    topology = reader.place.topology
    tasks = open_suite(suite, setting) if topology is None else open_suite_everywhere(suite, setting, topology.dp_group)
    return opened, tasks.run(opened.model, opened.title, opened.step, keep)


def _keep(opened: TaskModel, result: SuiteResult) -> Path | None:
    """Keep a result in the run's folder, and return where; nowhere if the model is of no run."""
    from megamem.evaluation.suites.result import write_suite

    return None if opened.run is None else write_suite(opened.run, result)


def _show(result: SuiteResult, path: Path | None) -> None:
    """Print the table of a suite, what is missing in it, and where it is kept."""
    from megamem.evaluation.suites.result import suite_table

    console.print(suite_table(result))
    for name, why in result.missing.items():
        write_line(f"missing: {name}: {why}")
    if path is not None:
        write_line(f"kept in {path}")
