"""`megamem attention`: what a trained model's tokens and memory rows attend to, by distance."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megamem.cli.compute import compute_device, compute_dtype
from megamem.cli.options import Device, Json, Precision, TrainedModel
from megamem.cli.output import console, write_json, write_line


def attention(
    model: TrainedModel,
    out: Annotated[Path, typer.Argument(help="folder to write")],
    overrides: Annotated[list[str] | None, typer.Argument(help="of the run's configuration: key=value")] = None,
    documents: Annotated[int, typer.Option(min=1, help="held-out documents that are read")] = 8,
    chunks: Annotated[int, typer.Option(min=1, help="most chunks of a document that are recorded")] = 16,
    dtype: Precision = "fp32",
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Show attention by distance, and what memory rows are mixed of (LaMemo, Transformer-XL)."""
    from megamem.evaluation.attention.recording import held_out_texts, record_attention
    from megamem.evaluation.attention.report import DISTANCES, attention_table, numbers, write_attention
    from megamem.evaluation.report import check_new, finite
    from megamem.evaluation.run import Passes
    from megamem.hf.trained import open_trained
    from megamem.training.held_out import held_out_text

    check_new(out)
    run = open_trained(model, overrides or [])
    held_out = held_out_text(run)
    stage = run.load(compute_dtype(dtype), compute_device(device))
    texts = held_out_texts(held_out, stage, chunks, documents)
    with Passes(None if as_json else console) as passes:
        found = record_attention(stage, texts, passes.named(run.title))
    write_attention(out, found, run.title)
    if as_json:
        write_json(finite(numbers(found)))
        return
    console.print(attention_table(found, run.title))
    write_line(f"{out / DISTANCES}")
