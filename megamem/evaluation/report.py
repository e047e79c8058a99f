"""What an evaluation leaves for people: evaluation.json, the picture, and a table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from megamem.errors import DataError
from megamem.evaluation.metrics import read_curves
from megamem.evaluation.picture import draw
from megamem.files import write_bytes, write_json

REPORT, PICTURE, METRICS = "evaluation.json", "evaluation.png", "metrics.jsonl"

_ROWS: tuple[tuple[str, str, str], ...] = (
    ("val_loss", "held-out loss", "{:.4f} nats per token"),
    ("val_perplexity", "perplexity", "{:,.2f} per token"),
    ("val_bits_per_byte", "bits per byte, model", "{:.4f}"),
    ("val_bits_per_character", "bits per character", "{:.4f}"),
    ("val_word_perplexity", "perplexity by words", "{:,.2f} per word"),
    ("val_word_perplexity_with_line_ends", "perplexity by words and ends of lines", "{:,.2f} per word or line end"),
    ("lzma_bits_per_byte", "bits per byte, LZMA on the same text", "{:.4f}"),
    ("val_accuracy", "most probable token is right", "{:.2%} of predicted tokens"),
    ("val_copy_loss", "held-out loss of copies", "{:.4f} nats per token"),
    ("val_copy_accuracy", "most probable token is right, copies", "{:.2%} of predicted tokens"),
    ("val_blank_copy_loss", "held-out loss of blank copies", "{:.4f} nats per token"),
    ("val_blank_copy_accuracy", "most probable token is right, blank copies", "{:.2%} of predicted tokens"),
    ("first_chunk_loss", "loss in first chunks", "{:.4f} nats per token"),
    ("beyond_first_chunk_loss", "loss beyond them", "{:.4f} nats per token"),
    ("memory_off_beyond_first_chunk_loss", "loss beyond them, memory off", "{:.4f} nats per token"),
    ("memory_off_loss", "held-out loss, memory off", "{:.4f} nats per token"),
    ("memory_gain", "gain of the memory", "{:+.4f} nats per token"),
    ("sliding_perplexity", "sliding window's perplexity", "{:,.2f} per token"),
    ("sliding_plain_perplexity", "the same tokens without it", "{:,.2f} per token"),
    ("sliding_tokens", "sliding window's tokens", "{:,}"),
    ("val_tokens", "held-out tokens predicted", "{:,}"),
    ("steps", "optimizer steps", "{:,}"),
    ("tokens", "tokens trained on", "{:,}"),
    ("tokens_per_second", "training speed", "{:,.0f} tokens/s"),
    ("evaluation_tokens_per_second", "evaluation speed", "{:,.0f} tokens/s"),
)


def result_table(result: Mapping[str, Any], title: str | None = None) -> Table:
    """Return a table of the figures of `final_evaluation`, with those of the training if they are merged in:

    `steps`, `tokens`, `tokens_per_second`.
    """
    table = Table(title=title, show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for key, label, form in _ROWS:
        if (value := result.get(key)) is not None:
            table.add_row(label, form.format(value))
    return table


def write_report(folder: Path, result: Mapping[str, Any], title: str) -> None:
    """Write evaluation.json and the picture into `folder`, each whole or not at all.

    Figures that are not finite are written as null.
    """
    write_json(folder / REPORT, finite(result))
    write_bytes(folder / PICTURE, draw(result, read_curves(folder / METRICS), title))


def check_new(folder: Path) -> None:
    """Raise DataError if there is something at `folder`."""
    if folder.exists():
        raise DataError(f"{folder}: exists already; choose another folder")


def write_new(folder: Path, name: str, numbers: object, others: Mapping[str, bytes]) -> None:
    """Write an analysis into a new folder, each file whole or not at all.

    Args:
        folder: where they go.
        name: of the file of numbers.
        numbers: plain data, written as JSON; figures that are not finite as null.
        others: contents of the other files, by name.
    Raises: DataError for a folder that exists or cannot be written.
    """
    check_new(folder)
    try:
        write_json(folder / name, finite(numbers))
        for other, data in others.items():
            write_bytes(folder / other, data)
    except OSError as error:
        raise DataError(f"{folder}: cannot be written ({error.strerror})") from None


def finite(value: Any) -> Any:
    """Return a copy of plain data with None in the place of numbers that JSON has no word for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return value
