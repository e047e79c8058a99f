"""Pictures of what layers attend to: shares by distance, and alpha by memory row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megamem.evaluation.attention.recording import Attention
from megamem.evaluation.picture import GREY, add_grid, new_figure, png

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_NAMED = 8
"""Layers that are named; of more, some in equal steps."""


def draw_distances(attention: Attention, title: str) -> bytes:
    """Return shares by distance as PNG: of tokens, and of memory rows that look ahead where there are any."""
    ahead = any(layer.ahead is not None for layer in attention.layers)
    figure = new_figure(12.8 if ahead else 7.2, 4.8)
    panels = figure.subplots(1, 2 if ahead else 1, squeeze=False).ravel()
    for axes, name in zip(panels, ("tokens", "ahead"), strict=False):
        for number, layer in enumerate(attention.layers):
            found = layer.tokens if name == "tokens" else layer.ahead
            if found is not None:
                color, label = _style(number, attention)
                axes.plot(found.distances, found.share, color=color, linewidth=1.1, label=label)
        axes.set_yscale("log")
        axes.set_ylabel("mean attention to the place at this distance")
    pooled = attention.all_layers
    panels[0].plot(pooled.distances, pooled.share, color="black", linewidth=1.8, label="all layers")
    for length in sorted({layer.memory_length for layer in attention.layers}):
        panels[0].axvline(length, color=GREY, linewidth=0.9, linestyle="--")
    panels[0].set_xlabel("tokens before the one that attends (dashed: length of the memory)")
    panels[0].set_title("tokens, to their chunk and the memory", fontsize=10)
    if ahead:
        panels[1].set_xlabel("places behind the row that looks ahead")
        panels[1].set_title("memory rows, looking ahead", fontsize=10)
    for axes in panels:
        _finish(axes)
    figure.suptitle(f"{title}: mean over heads and {attention.tokens:,} tokens", fontsize=11, parse_math=False)
    return png(figure)


def draw_alpha(attention: Attention, title: str) -> bytes:
    """Return alpha by memory row as PNG, one line for each layer that has any."""
    figure = new_figure(7.2, 4.8)
    axes = figure.subplots()
    for number, layer in enumerate(attention.layers):
        if layer.alpha is not None:
            color, label = _style(number, attention)
            axes.plot(range(len(layer.alpha)), layer.alpha, color=color, linewidth=1.2, label=label)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("memory row (0: the oldest)")
    axes.set_ylabel("alpha: share of what was read before")
    _finish(axes)
    chunks = attention.tokens // attention.chunk_size
    figure.suptitle(f"{title}: mean over heads and {chunks:,} chunks", fontsize=11, parse_math=False)
    return png(figure)


def _style(number: int, attention: Attention) -> tuple[tuple[float, ...], str]:
    """Return color and label of the layer `number`, by its place among all; a label that begins with _ is not shown."""
    from matplotlib import colormaps

    count = len(attention.layers)
    step = -(-count // MOST_NAMED)
    label = attention.layers[number].title
    return colormaps["viridis"](0.9 * number / max(count - 1, 1)), label if number % step == 0 else f"_{label}"


def _finish(axes: Axes) -> None:
    """Add grid and legend to a panel."""
    add_grid(axes)
    axes.legend(frameon=False, fontsize=9)
