"""`megamem compare`: models beside a reference on the same held-out documents, with standard errors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megamem.cli.options import Json
from megamem.cli.output import console, write_json, write_line


def compare(
    reference: Annotated[Path, typer.Argument(help="folder of the run that others are compared with")],
    models: Annotated[list[Path], typer.Argument(help="folders of other runs")],
    out: Annotated[Path | None, typer.Option(help="folder to write the numbers and a picture to")] = None,
    as_json: Json = False,
) -> None:
    """Compare evaluated runs: losses beyond the first chunk, paired by document.

    Reads the evaluation.json that `megamem train` leaves in a run's folder and `megamem evaluate --out` in FOLDER.
    """
    from megamem.evaluation.comparison import compare as compare_losses
    from megamem.evaluation.comparison_report import PICTURE, comparison_table, write_comparison
    from megamem.evaluation.recovered import read_losses
    from megamem.evaluation.report import check_new, finite

    if out is not None:
        check_new(out)
    found = compare_losses(read_losses(reference), [read_losses(model) for model in models])
    if out is not None:
        write_comparison(out, found)
    if as_json:
        write_json(finite(found.to_dict()))
        return
    console.print(comparison_table(found))
    if out is not None:
        write_line(f"{out / PICTURE}")
