"""`megamem recovered-share`: how much of what local attention loses against full attention a memory wins back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megamem.cli.compute import compute_device, compute_dtype
from megamem.cli.options import Device, Json, Precision, TrainedModel
from megamem.cli.output import console, write_json, write_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megamem.evaluation.recovered import ModelLosses
    from megamem.training.held_out import Trained

_OTHER = "path to it, or to the evaluation.json of it; the weights that MODEL began from if not given"


def recovered_share(
    model: TrainedModel,
    out: Annotated[Path, typer.Argument(help="folder to write")],
    overrides: Annotated[list[str] | None, typer.Argument(help="of all runs' configurations: key=value")] = None,
    local: Annotated[Path | None, typer.Option(help=f"model with attention within chunks only: {_OTHER}")] = None,
    full: Annotated[Path | None, typer.Option(help=f"model with full attention: {_OTHER}")] = None,
    dtype: Precision = "fp32",
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Compare a model with attention within chunks and with full attention, on the same held-out text."""
    from megamem.evaluation.recovered_report import PICTURE, recovered_table, write_recovered
    from megamem.evaluation.report import check_new, finite
    from megamem.hf.trained import open_trained
    from megamem.training.held_out import evaluate_recovered

    check_new(out)
    run = open_trained(model, overrides or [])
    report = evaluate_recovered(
        _reference(local, "local_attention", run, overrides or []),
        _reference(full, "full_attention", run, overrides or []),
        run,
        compute_dtype(dtype),
        compute_device(device),
        None if as_json else console,
    )
    write_recovered(out, report)
    if as_json:
        write_json(finite({**report.figures(), **report.to_dict()}))
        return
    console.print(recovered_table(report))
    write_line(f"{out / PICTURE}")


def _reference(path: Path | None, mixer: str, run: Trained, overrides: Sequence[str]) -> Trained | ModelLosses:
    """Open a model that a run is compared with, or losses that were measured before.

    path: where it lies; None for the weights that the run began from, with `mixer` in all layers.
    """
    from megamem.evaluation.recovered import read_losses
    from megamem.hf.imported import base_of, like
    from megamem.hf.trained import is_imported, open_trained

    if path is None:
        return base_of(run.config, mixer, run.origin)
    if path.suffix == ".json":
        return read_losses(path)
    return like(path, run.config, overrides) if is_imported(path) else open_trained(path, overrides)
