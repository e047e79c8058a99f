"""`megamem remembered`: whether a memory holds what was read, and words that it makes more probable."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megamem.cli.compute import compute_device, compute_dtype
from megamem.cli.options import Device, Json, Precision, TrainedModel
from megamem.cli.output import console, write_json, write_line


def remembered(
    model: TrainedModel,
    out: Annotated[Path, typer.Argument(help="folder to write")],
    overrides: Annotated[list[str] | None, typer.Argument(help="of its run's configuration: key=value")] = None,
    examples: Annotated[int, typer.Option(min=0, help="words to show")] = 10,
    dtype: Precision = "fp32",
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Read held-out text with the memory and without it: which tokens gain, by how long ago they were last read."""
    from megamem.evaluation.remembered_report import PICTURE, remembered_tables, write_remembered
    from megamem.evaluation.report import check_new, finite
    from megamem.hf.trained import open_trained
    from megamem.training.held_out import evaluate_remembered

    check_new(out)
    found = evaluate_remembered(
        open_trained(model, overrides or []), examples, compute_dtype(dtype), compute_device(device),
        None if as_json else console,
    )  # fmt: skip
    write_remembered(out, found)
    if as_json:
        write_json(finite(found.to_dict()))
        return
    for table in remembered_tables(found):
        console.print(table)
    write_line(f"{out / PICTURE}")
