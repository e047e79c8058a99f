"""`megamem evaluate`: held-out losses of a trained model, suites of tasks, or lm-eval's tasks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launchers.local_ranks import inside_job
from megamem.cli.compute import compute_dtype, compute_place
from megamem.cli.options import Device, Json, Precision, Readers, TrainedModel
from megamem.cli.output import console, write_json
from megamem.cli.suites import DATA, NAMES, Reader, Wanted, evaluate_suites, numbers
from megamem.errors import ConfigError

if TYPE_CHECKING:
    import torch


def evaluate(
    model: TrainedModel,
    overrides: Annotated[list[str] | None, typer.Argument(help="of the run's configuration: key=value")] = None,
    suite: Annotated[str | None, typer.Option(help=f"suites, separated by commas: {', '.join(NAMES)}")] = None,
    tasks: Annotated[str | None, typer.Option(help="lm-eval tasks, separated by commas")] = None,
    include_path: Annotated[Path | None, typer.Option(help="folder with task files of your own")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="documents of each task")] = None,
    max_length: Annotated[int | None, typer.Option(min=2, help="tokens of a task's window; trained length")] = None,
    rows: Annotated[int, typer.Option(min=1, help="requests read side by side")] = 8,
    lengths: Annotated[str | None, typer.Option(help="tokens of a suite's contexts, separated by commas")] = None,
    only: Annotated[str | None, typer.Option(help="tasks of a suite whose names begin so, separated by commas")] = None,
    data: Annotated[Path, typer.Option(help="folder of a suite's data (`megamem tasks fetch`)")] = DATA,
    transformers: Annotated[bool, typer.Option("--transformers", help="read tasks with transformers' code")] = False,
    dtype: Precision = "fp32",
    device: Device = None,
    processes: Readers = 1,
    out: Annotated[
        Path | None, typer.Option(help="folder for evaluation.json and the picture, with held-out text; none written")
    ] = None,
    as_json: Json = False,
) -> None:
    """Evaluate a trained model on held-out text, on suites of tasks or on lm-eval's tasks.

    Under torchrun this is one rank; otherwise the local processes are started for you.
    """
    if suite is None and tasks is None:
        _held_out(model, overrides or [], compute_dtype(dtype), device, processes, out, as_json)
        return
    if out is not None:
        raise ConfigError(f"--out {out}: is for held-out losses, not for --tasks")
    if overrides:
        raise ConfigError(f"{overrides[0]}: overrides are for held-out losses, not for --suite and --tasks")
    if suite is not None and tasks is not None:
        raise ConfigError("--suite and --tasks: give one of them")
    if transformers and (processes > 1 or inside_job()):
        raise ConfigError("--transformers: reads in one process")
    place = compute_place(device, processes)
    reader = Reader(model, max_length, rows, compute_dtype(dtype), place, transformers)
    if suite is not None:
        wanted = Wanted(data, numbers(lengths), limit, tuple(only.split(",")) if only else ())
        evaluate_suites(reader, suite.split(","), wanted, as_json)
        return
    from megamem.evaluation.run import Passes
    from megamem.evaluation.tasks import run_tasks
    from megamem.training.devices import is_rank_0

    names = (tasks or "").split(",")
    with Passes(console if is_rank_0() and not as_json else None) as passes:
        results = run_tasks(names, lambda: reader.open(None, passes.named("tasks")).model, include_path, limit)
    if results is not None and is_rank_0():
        write_json(results, indent=None if as_json else 2)


def _held_out(
    model: Path, overrides: Sequence[str], dtype: torch.dtype, device: str | None, processes: int, out: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Evaluate on held-out text, and print the table and its figures. out: a new folder for them, if any."""
    from megamem.evaluation.report import check_new, finite, result_table
    from megamem.hf.trained import open_trained
    from megamem.training.devices import is_rank_0
    from megamem.training.held_out import evaluate_run

    if out is not None:
        check_new(out)
    place = compute_place(device, processes)
    run = open_trained(model, overrides)
    result = evaluate_run(run, dtype, place.device, console, out)
    if not is_rank_0():
        return
    figures = finite(result.figures())
    console.print(result_table(figures, title=run.title))
    if as_json:
        write_json(figures)
