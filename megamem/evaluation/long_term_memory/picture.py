"""Pictures of long-term memories: attention by region and layer, and the memory space of each word."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from megamem.evaluation.long_term_memory.analysis import Analysis, LayerAnalysis
from megamem.evaluation.long_term_memory.attention import BINS
from megamem.evaluation.long_term_memory.cells import Float64
from megamem.evaluation.picture import BLUE, GREY, ORANGE, new_figure, png

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 4
"""Panels side by side."""
LABELS = 8
"""Words that are named in the picture of the memory space."""
LABEL_ROOM = 50
"""Names that find room side by side."""
LONGEST_LABEL = 18
"""Characters of a name in a picture."""


def draw_histograms(analysis: Analysis) -> bytes:
    """Return the attention to each region of the memory as PNG, one panel for each layer."""
    layers = analysis.layers
    columns = min(COLUMNS, len(layers))
    rows = -(-len(layers) // columns)
    figure = new_figure(3.4 * columns + 0.6, 2.6 * rows + 0.5)
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True).ravel()
    for axes, layer in zip(panels, layers, strict=False):
        found = layer.histogram
        axes.bar((np.arange(BINS) + 0.5) / BINS, found.density, width=1 / BINS, color=BLUE)
        for border in found.borders:
            axes.axvline(border, color=GREY, linewidth=0.8, linestyle="--")
        axes.set_xlim(0, 1)
        axes.set_title(layer.title, fontsize=10, parse_math=False)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[len(layers) :]:
        axes.set_visible(False)
    documents = f"{analysis.documents} document{'s' if analysis.documents > 1 else ''}"
    figure.supxlabel("place in the long-term memory (0: oldest; dashed: borders of chunks)", fontsize=10)
    figure.supylabel("attention (density)", fontsize=10)
    figure.suptitle(f"attention to the long-term memory, mean over heads, tokens and {documents}", fontsize=11)
    return png(figure)


def draw_memory_space(layer: LayerAnalysis) -> bytes:
    """Return the part of one layer's memory that each word occupies as PNG, without and with sticky memories."""
    spaces = [("samples at equal distances (without sticky memories)", layer.equal_space, GREY)]
    if layer.sticky != "none":
        spaces.append((f"sticky memories ({layer.sticky})", layer.space, ORANGE))
    figure = new_figure(11.0, 2.6 * len(spaces) + 0.6)
    panels = figure.subplots(len(spaces), 1, squeeze=False, sharex=True, sharey=True).ravel()
    ends = np.array([word.end for word in layer.remembered])
    for axes, (label, space, color) in zip(panels, spaces, strict=True):
        axes.bar(np.arange(len(space)), space, width=1.0, align="edge", color=color)
        for border in layer.borders:
            axes.axvline(np.searchsorted(ends, border), color=GREY, linewidth=0.8, linestyle="--")
        axes.set_xlim(0, len(space))
        axes.set_ylabel("memory space")
        axes.set_title(f"{layer.title}, {label}", fontsize=10, parse_math=False)
        axes.spines[["top", "right"]].set_visible(False)
    _name_largest(panels[-1], layer, spaces[-1][1])
    panels[-1].set_xlabel("words in the memory, in the order of the text (dashed: borders of chunks)")
    panels[0].set_ylim(0, 1.7 * max(float(space.max()) for _, space, _ in spaces))
    return png(figure)


def _name_largest(axes: Axes, layer: LayerAnalysis, space: Float64) -> None:
    """Write the words with the largest memory space [words] over their bars, but for those close to a larger one."""
    named: list[int] = []
    for index in np.argsort(space)[::-1].tolist():
        if len(named) == LABELS or space[index] == 0:
            break
        if any(abs(index - other) <= len(space) // LABEL_ROOM for other in named):
            continue
        named.append(index)
        text = " ".join(layer.remembered[index].text.split())
        text = text if len(text) <= LONGEST_LABEL else text[: LONGEST_LABEL - 1] + "…"
        axes.text(
            index + 0.5, float(space[index]), f" {text}", rotation=60, fontsize=8, va="bottom",
            ha="left", rotation_mode="anchor", parse_math=False,
        )  # fmt: skip
