"""`megamem evaluate`: held-out losses of a trained model, suites of tasks, or lm-eval's tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launchers.local_ranks import inside_job
from megamem.cli.compute import compute_dtype, compute_place
from megamem.cli.options import Device, Json, Precision, Readers, TrainedModel
from megamem.cli.output import console, write_json
from megamem.cli.suites import DATA, NAMES, Reader, Wanted, evaluate_suites, names, numbers
from megamem.errors import ConfigError

if TYPE_CHECKING:
    import torch

HELD_OUT = "held-out losses"
ROWS = 8


def evaluate(
    model: TrainedModel,
    overrides: Annotated[list[str] | None, typer.Argument(help="of the run's configuration: key=value")] = None,
    suite: Annotated[str | None, typer.Option(help=f"suites, separated by commas: {', '.join(NAMES)}")] = None,
    tasks: Annotated[str | None, typer.Option(help="lm-eval tasks, separated by commas")] = None,
    include_path: Annotated[Path | None, typer.Option(help="folder with task files of your own")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="documents of each task")] = None,
    max_length: Annotated[int | None, typer.Option(min=2, help="tokens of a task's window; trained length")] = None,
    rows: Annotated[int | None, typer.Option(min=1, help=f"requests read side by side; {ROWS}")] = None,
    lengths: Annotated[str | None, typer.Option(help="tokens of a suite's contexts, separated by commas")] = None,
    only: Annotated[str | None, typer.Option(help="tasks of a suite whose names begin so, separated by commas")] = None,
    data: Annotated[Path | None, typer.Option(help=f"folder of a suite's data (`megamem tasks fetch`); {DATA}")] = None,
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
    if suite is not None and tasks is not None:
        raise ConfigError("--suite and --tasks: give one of them")
    if overrides and (suite is not None or tasks is not None):
        raise ConfigError(f"{overrides[0]}: overrides are for held-out losses, not for --suite and --tasks")
    asked = "--suite" if suite is not None else "--tasks" if tasks is not None else HELD_OUT
    both = ("--suite", "--tasks")
    _refuse(asked, (HELD_OUT,), {"--out": out})
    _refuse(asked, both, {"--limit": limit, "--max-length": max_length, "--rows": rows})
    _refuse(asked, both, {"--transformers": transformers or None})
    _refuse(asked, ("--suite",), {"--lengths": lengths, "--only": only, "--data": data})
    _refuse(asked, ("--tasks",), {"--include-path": include_path})
    if asked == HELD_OUT:
        _held_out(model, overrides or [], compute_dtype(dtype), device, processes, out, as_json)
        return
    if transformers and (processes > 1 or inside_job()):
        raise ConfigError("--transformers: reads in one process")
    place = compute_place(device, processes)
    reader = Reader(model, max_length, rows or ROWS, compute_dtype(dtype), place, transformers)
    if suite is not None:
        wanted = Wanted(data or DATA, numbers(lengths), limit, names(only))
        evaluate_suites(reader, names(suite), wanted, as_json)
        return
    from megamem.evaluation.run import Passes
    from megamem.evaluation.tasks import run_tasks
    from megamem.training.devices import is_rank_0

    with Passes(console if is_rank_0() and not as_json else None) as passes:
        results = run_tasks(names(tasks), lambda: reader.open(None, passes.named("tasks")).model, include_path, limit)
    if results is not None and is_rank_0():
        write_json(results, indent=None if as_json else 2)


def _refuse(asked: str, kinds: Sequence[str], options: Mapping[str, object]) -> None:
    """Raise ConfigError naming an option that was given and says nothing about what is asked."""
    for name, value in options.items():
        if value is not None and asked not in kinds:
            raise ConfigError(f"{name}: is for {' and '.join(kinds)}, not for {asked}")


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
    result = evaluate_run(run, dtype, place.device, None if as_json else console, out)
    if not is_rank_0():
        return
    figures = finite(result.figures())
    if as_json:
        write_json(figures)
    else:
        console.print(result_table(figures, title=run.title))
