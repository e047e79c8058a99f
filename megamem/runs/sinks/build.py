"""The sinks of a run, as its configuration names them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from megamem.config.run import RunConfig
from megamem.runs.sinks.base import Sink
from megamem.runs.sinks.console import ConsoleLines
from megamem.runs.sinks.json_lines import JsonLines
from megamem.runs.sinks.tensorboard import TensorBoard
from megamem.runs.sinks.wandb import Wandb


def build_sinks(config: RunConfig, folder: Path, console: Console, step: int = 0) -> list[Sink]:
    """Open the sinks of rank 0. step: where the run resumes, 0 for a new run."""
    sinks: list[Sink] = [JsonLines(folder / "metrics.jsonl", step), ConsoleLines(console, config.steps)]
    if config.logging.tensorboard:
        sinks.append(TensorBoard(folder, step))
    if config.logging.wandb.mode != "disabled":
        sinks.append(Wandb(config, folder))
    sinks += [sink.build(folder, step) for sink in config.logging.sinks]
    return sinks


@contextmanager
def closing(sinks: Sequence[Sink]) -> Iterator[None]:
    """Close the sinks at the end of the block, whatever happens in it."""
    try:
        yield
    finally:
        for sink in sinks:
            sink.close()
