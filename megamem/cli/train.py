"""`megamem train` and `megamem start-from`: a run or a curriculum, as one rank or as the local processes of a job."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megamem.cli.options import ModelFile, Overrides, Processes, RecipePath
from megamem.cli.output import console, write_json, write_line
from megamem.errors import STOPPED, CheckpointError, ConfigError

MODEL, WEIGHTS = "model.yaml", "weights.safetensors"
"""What `megamem convert from-hf` writes of a model."""

if TYPE_CHECKING:
    from megamem.config.run import RunConfig


def train(
    config: RecipePath,
    overrides: Overrides = None,
    model: ModelFile = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print everything, run one mock step, write nothing")
    ] = False,
    processes: Processes = None,
    resume: Annotated[str | None, typer.Option(help="auto, none or a checkpoint; as checkpoint.resume")] = None,
    fallback: Annotated[
        bool, typer.Option("--fallback", help="skip damaged checkpoints; as checkpoint.fallback")
    ] = False,
    no_memory_check: Annotated[
        bool, typer.Option("--no-memory-check", help="this time, do not compare the plan with the devices' memory")
    ] = False,
) -> None:
    """Train a model, or the lessons of a curriculum.

    Under torchrun this is one rank; otherwise the local processes are started for you.
    """
    from launchers.local_ranks import inside_job, run_local
    from megamem.config.curriculum import load_runs
    from megamem.config.recipe import auto_overrides
    from megamem.planning.auto import is_open
    from megamem.training.curriculum import expect_lessons
    from megamem.training.devices import from_rank_0, is_rank_0, local_processes

    overrides = [
        *(overrides or []),
        *([f"checkpoint.resume={resume}"] if resume else []),
        *(["checkpoint.fallback=true"] if fallback else []),
    ]
    runs = load_runs(config, overrides, model)
    if len(runs) > 1:
        expect_lessons(runs)
    count = int(os.environ["WORLD_SIZE"]) if inside_job() else processes or max(map(local_processes, runs))

    def settled() -> list[RunConfig]:
        return [_settled(run, count, dry_run, check_memory=not no_memory_check) for run in runs]

    if inside_job() and count > 1 and any(is_open(run, count) for run in runs):
        runs = from_rank_0(runs[0].parallel.timeout_s, settled)
    elif is_rank_0():  # the others wait for rank 0 to join, and end with it
        runs = settled()
    _prepare_processor(runs)
    if inside_job() or count == 1:
        _run_rank(runs, dry_run)
        return
    flags = [*(["--model", str(model)] if model else []), *(["--dry-run"] if dry_run else [])]
    # what was chosen and compared here holds for the ranks
    chosen = [*(override for run in runs for override in auto_overrides(run)), "--no-memory-check"]
    raise typer.Exit(run_local(count, ["train", str(config), *overrides, *chosen, *flags]))


def start_from(
    weights: Annotated[
        Path, typer.Argument(help="safetensors file of a run's weights, or a folder of `megamem convert from-hf`")
    ],
    config: RecipePath,
    overrides: Overrides = None,
    model: ModelFile = None,
    processes: Processes = None,
) -> None:
    """Train from given weights instead of random ones: a new run, with its own data, schedule and optimizer state."""
    from megamem.config.load import read_yaml
    from megamem.config.recipe import LESSONS

    named: list[str] = []
    if weights.is_dir():
        # the imported model, and a run that has the folder's name and not that of every such model file
        model, named, weights = model or weights / MODEL, [f"name={weights.resolve().name}"], weights / WEIGHTS
    if not weights.is_file():
        raise CheckpointError(f"{weights}: no such weights file; megamem checkpoint merge makes one from a checkpoint")
    if config.is_file() and LESSONS in read_yaml(config):
        raise ConfigError(
            f"{config}: is a curriculum; give `megamem train` lessons.NAME.training.init_from={weights} for the lesson "
            "that starts from these weights"
        )
    train(config, [*named, *(overrides or []), f"training.init_from={weights}"], model, processes=processes)


def _settled(run: RunConfig, ranks: int, dry_run: bool, check_memory: bool) -> RunConfig:
    """Return a run or lesson with numbers for `auto`, once everything that can be checked before it starts has been."""
    from megamem.training.checks import check_kernels, check_layout, check_run
    from megamem.training.curriculum import of_lesson
    from megamem.training.devices import settle

    with of_lesson(run):
        check_kernels(run)
        found = settle(run, ranks, check=check_memory)
        (check_layout if dry_run else check_run)(found, ranks)
    return found


def _prepare_processor(runs: Sequence[RunConfig]) -> None:
    """Switch off what the processor announces for BF16 but cannot do, and say so."""
    from megamem.hardware import avoid_broken_amx

    bf16 = any(run.training.precision == "bf16" for run in runs)
    if bf16 and (line := avoid_broken_amx()) and os.environ.get("LOCAL_RANK", "0") == "0":
        write_line(line)


def _run_rank(runs: Sequence[RunConfig], dry_run: bool) -> None:
    """Train as this rank. Rank 0 prints each result as JSON; a run that was stopped exits with STOPPED."""
    from megamem.training.curriculum import dry_run_lessons, train_lessons
    from megamem.training.devices import is_rank_0

    if dry_run:
        dry_run_lessons(runs, console)
        return
    for run, result in zip(runs, train_lessons(runs, console), strict=False):  # fewer results where one was stopped
        if result is None:
            if is_rank_0():
                write_line(_stopped(run))
            raise typer.Exit(STOPPED)
        if is_rank_0():
            write_json(result.to_dict())


def _stopped(settings: RunConfig) -> str:
    """Return the line about a run that ended before its last step."""
    cause = "as training.stop_after says" if settings.training.stop_after else "by a signal at a step border"
    again = "the same command goes on" if settings.checkpoint.resume == "auto" else "checkpoint.resume=auto goes on"
    return f"stopped {cause}; the checkpoint is saved, and {again}"
