"""The files of what layers attend to: numbers as JSON, and pictures; a table for the console."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich.table import Table

from megamem.evaluation.attention.by_distance import ByDistance
from megamem.evaluation.attention.picture import draw_alpha, draw_distances
from megamem.evaluation.attention.recording import Attention, LayerAttention
from megamem.evaluation.report import write_new

NUMBERS, DISTANCES, ALPHA = "attention.json", "attention.png", "alpha.png"


def write_attention(folder: Path, attention: Attention, title: str) -> None:
    """Write all files into a new folder: `alpha.png` where memory rows are mixed.

    title: name of the model in pictures. Raises: DataError for a folder that exists or cannot be written.
    """
    pictures = {DISTANCES: draw_distances(attention, title)}
    if any(layer.alpha is not None for layer in attention.layers):
        pictures[ALPHA] = draw_alpha(attention, title)
    write_new(folder, NUMBERS, numbers(attention), pictures)


def numbers(attention: Attention) -> dict[str, object]:
    """Return all figures as plain data."""
    return {
        "documents": attention.documents,
        "tokens": attention.tokens,
        "chunk_size": attention.chunk_size,
        "layers": [_layer(layer) for layer in attention.layers],
        "all_layers": {"tokens": _by_distance(attention.all_layers)},
    }


def _layer(layer: LayerAttention) -> dict[str, object]:
    """Return the figures of one layer."""
    return {
        "name": layer.name,
        "memory_length": layer.memory_length,
        "tokens": _by_distance(layer.tokens),
        "memory_share": layer.memory_share,
        "ahead": None if layer.ahead is None else _by_distance(layer.ahead),
        "alpha": None if layer.alpha is None else layer.alpha.tolist(),
    }


def _by_distance(found: ByDistance) -> dict[str, object]:
    """Return means by distance as lists, which are parallel."""
    return {
        "distance": found.distances.tolist(), "share": found.share.tolist(), "pairs": found.pairs.tolist(),
    }  # fmt: skip


def attention_table(attention: Attention, title: str) -> Table:
    """Return a table: for each layer what goes to the memory, and alpha of the oldest and the newest rows."""
    table = Table(title=f"{title}: {attention.tokens:,} tokens of {attention.documents} documents")
    names = ("layer", "attention to the memory", "alpha, mean", "oldest quarter of rows", "newest quarter")
    for name in names:
        table.add_column(name, justify="left" if name == "layer" else "right")
    for layer in attention.layers:
        alpha = ["-"] * 3
        if layer.alpha is not None:
            quarter = max(len(layer.alpha) // 4, 1)
            parts = (layer.alpha, layer.alpha[:quarter], layer.alpha[-quarter:])
            alpha = [f"{np.mean(part):.3f}" for part in parts]
        table.add_row(layer.title, f"{layer.memory_share:.1%}", *alpha)
    return table
