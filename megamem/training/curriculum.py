"""The lessons of a curriculum on one rank: checked together, then trained one after the other in the same process.

A run by itself is treated as a curriculum of one lesson.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from rich.console import Console

from megamem.config.curriculum import FILE, dump_curriculum
from megamem.config.recipe import LESSONS
from megamem.config.run import RunConfig
from megamem.errors import MegamemError, RunFolderError
from megamem.files import write_bytes
from megamem.pipeline.start_weights import expect_weights
from megamem.runs.result import RunResult
from megamem.training.devices import is_rank_0
from megamem.training.dry_run import dry_run
from megamem.training.train import train
from tokenization.tokenizer import Tokenizer


@contextmanager
def of_lesson(run: RunConfig) -> Iterator[None]:
    """Put the lesson's name in front of errors of the block, where the run is one."""
    try:
        yield
    except MegamemError as error:
        if run.lesson is None:
            raise
        raise type(error)(f"{LESSONS}.{run.lesson}: {error}") from None


def expect_lessons(runs: Sequence[RunConfig]) -> None:
    """Let what looks at the weights that a lesson starts from know of those that earlier lessons will write."""
    for run in runs:
        path = run.data.tokenizer
        expect_weights(run.weights, run.model, Tokenizer.load(path).vocabulary_hash if path and path.exists() else None)


def train_lessons(runs: Sequence[RunConfig], console: Console) -> Iterator[RunResult | None]:
    """Train runs one after the other on this rank, and yield the result of each; see `train`.

    Those that have ended before are passed over. None is the last value where one was stopped.

    Raises: MegamemError as `train`; later runs are not begun.
    """
    if runs[0].lesson is not None and is_rank_0():
        _write_curriculum(runs)
    for number, run in enumerate(runs, 1):
        _announce(run, number, len(runs), console)
        result = train(run, console)
        yield result
        if result is None:
            return
        _forget()


def dry_run_lessons(runs: Sequence[RunConfig], console: Console) -> None:
    """Make the dry run of each run, one after the other; see `dry_run`."""
    for number, run in enumerate(runs, 1):
        _announce(run, number, len(runs), console)
        dry_run(run, console)
        _forget()


def _write_curriculum(runs: Sequence[RunConfig]) -> None:
    """Write the file that trains the curriculum again into its folder. Raises RunFolderError."""
    folder = runs[0].runs_folder
    if (folder / "config.yaml").exists():
        raise RunFolderError(f"{folder}: holds a run; choose another `name` for the curriculum")
    try:
        write_bytes(folder / FILE, dump_curriculum(runs).encode())
    except OSError as error:
        raise RunFolderError(f"{folder}: cannot be written ({error.strerror}); choose another `runs_folder`") from None


def _announce(run: RunConfig, number: int, total: int, console: Console) -> None:
    """Print which lesson begins."""
    if run.lesson is not None and is_rank_0():
        console.print(f"lesson {number} of {total}: {run.lesson}", highlight=False)


def _forget() -> None:
    """Drop what a run that has ended leaves in the process, so that the next begins as in a fresh one."""
    gc.collect()
    if "torch._dynamo" in sys.modules:
        # shapes of one model would make the code that is compiled for the next another one
        torch.compiler.reset()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
