"""`megamem memory-length`: held-out loss of trained models by the length of their memory."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from megamem.cli.compute import compute_device, compute_dtype
from megamem.cli.options import Device, Json, Precision
from megamem.cli.output import console, write_json, write_line
from megamem.errors import ConfigError


def memory_length(
    models: Annotated[list[Path], typer.Argument(help="checkpoints, run folders, or exported models")],
    out: Annotated[Path, typer.Argument(help="folder to write")],
    segments: Annotated[str, typer.Option(help="lengths of the memory in chunks: 1-10, or 1,2,4")] = "1-10",
    override: Annotated[
        list[str] | None, typer.Option(help="of all runs' configurations: key=value; several times for several")
    ] = None,
    dtype: Precision = "fp32",
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Evaluate trained models with memories of several lengths: the same weights and held-out tokens each time."""
    lengths = chosen_segments(segments)
    from megamem.evaluation.memory_length import PICTURE, length_table, numbers, write_curves
    from megamem.evaluation.report import check_new, finite
    from megamem.hf.trained import open_trained
    from megamem.training.held_out import evaluate_lengths

    check_new(out)
    opened = [partial(open_trained, model) for model in models]
    curves = evaluate_lengths(
        opened, lengths, override or [], compute_dtype(dtype), compute_device(device), None if as_json else console
    )
    write_curves(out, curves)
    if as_json:
        write_json(finite(numbers(curves)))
        return
    console.print(length_table(curves))
    write_line(f"{out / PICTURE}")


def chosen_segments(text: str) -> list[int]:
    """Return the numbers in `1-10` or `1,2,4-6`, each once, in ascending order. Raises ConfigError."""
    chosen: set[int] = set()
    for part in text.split(","):
        ends = part.strip().split("-")
        if len(ends) > 2 or not all(end.isdecimal() for end in ends) or int(ends[0]) > int(ends[-1]):
            raise ConfigError(f"--segments {text}: give numbers of chunks, as 1-10 or 1,2,4")
        chosen.update(range(int(ends[0]), int(ends[-1]) + 1))
    return sorted(chosen)
