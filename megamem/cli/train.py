"""`megamem train` and `megamem start-from`: a run, as one rank or as the local processes of a job."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megamem.cli.options import ModelFile, Overrides, Processes, RecipePath
from megamem.cli.output import console, write_json, write_line
from megamem.errors import STOPPED, CheckpointError

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
    """Train a model. Under torchrun this is one rank; otherwise the local processes are started for you."""
    from launchers.local_ranks import inside_job, run_local
    from megamem.config.recipe import auto_overrides, load_run
    from megamem.planning.auto import is_open
    from megamem.training.checks import check_kernels, check_layout, check_run
    from megamem.training.devices import from_rank_0, local_processes, settle

    overrides = [
        *(overrides or []),
        *([f"checkpoint.resume={resume}"] if resume else []),
        *(["checkpoint.fallback=true"] if fallback else []),
    ]
    settings = load_run(config, overrides, model)
    count = int(os.environ["WORLD_SIZE"]) if inside_job() else processes or local_processes(settings)

    def settled() -> RunConfig:
        check_kernels(settings)
        found = settle(settings, count, check=not no_memory_check)
        (check_layout if dry_run else check_run)(found, count)
        return found

    if inside_job() and count > 1 and is_open(settings, count):
        settings = from_rank_0(settings, settled)
    elif _is_rank_0():  # the others wait for rank 0 to join, and end with it
        settings = settled()
    _prepare_processor(settings.training.precision)
    if inside_job() or count == 1:
        _run_rank(settings, dry_run)
        return
    flags = [*(["--model", str(model)] if model else []), *(["--dry-run"] if dry_run else [])]
    # what was chosen and compared here holds for the ranks
    chosen = [*auto_overrides(settings), "--no-memory-check"]
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
    named: list[str] = []
    if weights.is_dir():
        # the imported model, and a run that has the folder's name and not that of every such model file
        model, named, weights = model or weights / MODEL, [f"name={weights.resolve().name}"], weights / WEIGHTS
    if not weights.is_file():
        raise CheckpointError(f"{weights}: no such weights file; megamem checkpoint merge makes one from a checkpoint")
    train(config, [*named, *(overrides or []), f"training.init_from={weights}"], model, processes=processes)


def _is_rank_0() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _prepare_processor(precision: str) -> None:
    """Switch off what the processor announces for BF16 but cannot do, and say so."""
    from megamem.hardware import avoid_broken_amx

    if precision == "bf16" and (line := avoid_broken_amx()) and os.environ.get("LOCAL_RANK", "0") == "0":
        write_line(line)


def _run_rank(settings: RunConfig, dry_run: bool) -> None:
    """Train as this rank. Rank 0 prints the result as JSON; a run that was stopped exits with STOPPED."""
    from megamem.training.dry_run import dry_run as dry_run_rank
    from megamem.training.train import train as train_rank

    if dry_run:
        dry_run_rank(settings, console)
        return
    result = train_rank(settings, console)
    if result is None:
        if _is_rank_0():
            write_line(_stopped(settings))
        raise typer.Exit(STOPPED)
    if _is_rank_0():
        write_json(result.to_dict())


def _stopped(settings: RunConfig) -> str:
    """Return the line about a run that ended before its last step."""
    cause = "as training.stop_after says" if settings.training.stop_after else "by a signal at a step border"
    again = "the same command goes on" if settings.checkpoint.resume == "auto" else "checkpoint.resume=auto goes on"
    return f"stopped {cause}; the checkpoint is saved, and {again}"
