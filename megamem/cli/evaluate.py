"""`megamem evaluate`: held-out losses of a trained model, or lm-eval's tasks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megamem.cli.compute import compute_device, compute_dtype
from megamem.cli.options import Device, Json, Precision, TrainedModel
from megamem.cli.output import console, write_json
from megamem.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from lm_eval.api.model import LM


def evaluate(
    model: TrainedModel,
    overrides: Annotated[list[str] | None, typer.Argument(help="of the run's configuration: key=value")] = None,
    tasks: Annotated[str | None, typer.Option(help="lm-eval tasks, separated by commas")] = None,
    include_path: Annotated[Path | None, typer.Option(help="folder with task files of your own")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="documents of each task")] = None,
    max_length: Annotated[int | None, typer.Option(min=2, help="tokens of a task's window; trained length")] = None,
    rows: Annotated[int, typer.Option(min=1, help="requests read side by side")] = 8,
    dtype: Precision = "fp32",
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Evaluate a checkpoint or an export on held-out text or on lm-eval's tasks."""
    if tasks is None:
        figures = _held_out(model, overrides or [], compute_dtype(dtype), compute_device(device))
        if as_json:
            write_json(figures)
        return
    if overrides:
        raise ConfigError(f"{overrides[0]}: overrides are for held-out losses, not for --tasks")
    from megamem.evaluation.tasks import run_tasks
    from megamem.hf.trained import is_exported

    torch_dtype = compute_dtype(dtype)

    def open_model() -> LM:
        opened = _exported_task_model if is_exported(model) else _task_model
        return opened(model, max_length, rows, torch_dtype, compute_device(device))

    results = run_tasks(tasks.split(","), open_model, include_path, limit)
    write_json(results, indent=None if as_json else 2)


def _held_out(
    model: Path, overrides: Sequence[str], dtype: torch.dtype, device: torch.device
) -> dict[str, float | int | str | None]:
    """Evaluate on held-out text, print the table and return its figures."""
    from megamem.evaluation.report import finite, result_table
    from megamem.hf.trained import open_trained
    from megamem.training.held_out import evaluate_run

    run = open_trained(model, overrides)
    figures: dict[str, float | int | str | None] = finite(evaluate_run(run, dtype, device, console).figures())
    console.print(result_table(figures, title=run.title))
    return figures


def _task_model(model: Path, max_length: int | None, rows: int, dtype: torch.dtype, device: torch.device) -> LM:
    """Return a checkpoint's model with lm-eval's interface. Raises ConfigError without a tokenizer."""
    from checkpoints.trained import open_run
    from megamem.evaluation.evaluator import Evaluator
    from megamem.evaluation.harness import HarnessModel
    from tokenization.tokenizer import Tokenizer

    run = open_run(model)
    if run.config.data.tokenizer is None:
        raise ConfigError(f"{model}: its run names no tokenizer")
    evaluator = Evaluator(run.load(dtype, device), rows=rows)
    return HarnessModel(
        evaluator, Tokenizer.load(run.config.data.tokenizer), max_length or run.config.data.sequence_length
    )


def _exported_task_model(
    model: Path, max_length: int | None, rows: int, dtype: torch.dtype, device: torch.device
) -> LM:
    """Return an exported model with lm-eval's own interface for transformers."""
    from lm_eval.models.huggingface import HFLM

    from megamem.hf.exported import open_export

    opened, tokenizer = open_export(model, dtype)
    return HFLM(
        pretrained=opened.to(device),  # type: ignore[arg-type]  # `to` is torch's, behind a decorator
        tokenizer=tokenizer,
        max_length=max_length,
        batch_size=rows,
        softmax_dtype="float32",
    )
