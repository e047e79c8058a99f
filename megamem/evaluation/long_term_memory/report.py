"""The files of an analysis: numbers as JSON, two pictures, and a page that shows them with the text."""

from __future__ import annotations

from pathlib import Path

from megamem.evaluation.long_term_memory.analysis import Analysis, LayerAnalysis
from megamem.evaluation.long_term_memory.page import render
from megamem.evaluation.long_term_memory.picture import draw_histograms, draw_memory_space
from megamem.evaluation.report import write_new

NUMBERS, HISTOGRAMS, SPACE, PAGE = "long_term_memory.json", "attention.png", "memory_space.png", "words.html"


def write_analysis(folder: Path, analysis: Analysis, layer: LayerAnalysis, threshold: float) -> None:
    """Write all files into a new folder, each whole or not at all.

    Args:
        folder: where they go.
        analysis: of all layers.
        layer: the one that is shown in the page and in the picture of the memory space.
        threshold: share of the attention from which on a word is shaded.
    Raises: DataError for a folder that exists or cannot be written.
    """
    histograms, space = draw_histograms(analysis), draw_memory_space(layer)
    pictures = [("attention to each region of the memory", histograms), ("memory space of each word", space)]
    page = render(analysis, layer, threshold, pictures).encode("utf-8")
    write_new(folder, NUMBERS, numbers(analysis), {HISTOGRAMS: histograms, SPACE: space, PAGE: page})


def numbers(analysis: Analysis) -> dict[str, object]:
    """Return all figures as plain data."""
    return {
        "documents": analysis.documents,
        "document": analysis.document,
        "layers": [_layer(layer) for layer in analysis.layers],
    }


def _layer(layer: LayerAnalysis) -> dict[str, object]:
    """Return the figures of one layer; lists over words are parallel."""
    return {
        "name": layer.name,
        "sticky": layer.sticky,
        "chunk": layer.chunk,
        "histogram": {
            "density": layer.histogram.density.tolist(),
            "outside": layer.histogram.outside,
            "borders": list(layer.histogram.borders),
            "tokens": layer.histogram.tokens,
        },
        "attention": {
            "predicted": layer.predicted,
            "words": [word.text for word in layer.attended],
            "tokens": [word.begin for word in layer.attended],
            "attention": layer.attention.tolist(),
        },
        "memory_space": {
            "words": [word.text for word in layer.remembered],
            "tokens": [word.begin for word in layer.remembered],
            "space": layer.space.tolist(),
            "space_at_equal_distances": layer.equal_space.tolist(),
        },
    }
