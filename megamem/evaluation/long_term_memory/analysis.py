"""The three analyses of a model's long-term memories: attention by region, attended words, memory space by word.

Martins, Marinho and Martins, "infinity-former: Infinite Memory Transformer", 2022, figures 4 to 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megamem.errors import ConfigError
from megamem.evaluation.long_term_memory.attention import Histogram, attention_to, histogram
from megamem.evaluation.long_term_memory.cells import Cells, Float64
from megamem.evaluation.long_term_memory.reads import Read, long_term_layers, read_document
from megamem.evaluation.long_term_memory.texts import cut_texts
from megamem.evaluation.long_term_memory.words import Decode, Word, between, number_tokens, split_pieces, split_words
from megamem.evaluation.texts import Text
from megamem.model.stage import Stage

CHUNKS = 6
"""How many chunks the memory holds at the end if not said otherwise: five updates after the first, as in the paper."""


@dataclass(frozen=True)
class LayerAnalysis:
    """What one layer's memory was attended to with, and how the words of one document share it."""

    name: str
    """Name of the mixer in the model."""
    title: str
    """Its name in pictures."""
    sticky: str
    """Where the old signal is sampled, as configured."""
    chunk: int
    """Tokens that are added to the memory at once."""
    histogram: Histogram
    """Attention by region, over all documents."""
    predicted: int
    """Number of the token whose prediction `attention` belongs to."""
    attended: tuple[Word, ...]
    """The words in the memory then; none if it was empty."""
    attention: Float64
    """[words] the share of the attention that each of them gets, a mean over heads."""
    remembered: tuple[Word, ...]
    """The words in the memory at the end."""
    space: Float64
    """[words] the part of [0, 1] that each of them occupies."""
    equal_space: Float64
    """[words] the part that each would occupy if samples lay at equal distances (without sticky memories)."""
    borders: tuple[int, ...]
    """Numbers of the tokens with which the chunks in the memory begin at the end, but for the first."""


@dataclass(frozen=True)
class Analysis:
    """The analyses of all layers with a long-term memory."""

    documents: int
    """Documents read."""
    document: str
    """Name of the one whose words are shown."""
    words: tuple[Word, ...]
    """Its words, as far as it was read."""
    layers: tuple[LayerAnalysis, ...]


def analyze(
    stage: Stage,
    texts: Sequence[Text],
    decode: Decode | None,
    *,
    chunks: int = CHUNKS,
    layer: int | None = None,
    token: int | None = None,
    by_token: bool = False,
) -> tuple[Analysis, LayerAnalysis]:
    """Read documents with a whole model and analyze what its long-term memories are attended to with.

    Args:
        stage: the model.
        texts: the documents; the first of the longest is the one whose words are shown.
        decode: maps ids to text; without it, tokens are shown by their ids.
        chunks: the most chunks that the memory holds at the end of a document.
        layer: number of the layer that is shown; the last one with a long-term memory if not given.
        token: number of the token whose prediction is shown; if not given, the one of the last chunk that gives most
            of its attention to a single word.
        by_token: whether single tokens are shown in the place of words.
    Returns: the analysis of all layers, and the layer that is shown.
    Raises: ConfigError for a model without long-term memories, a layer or token that is none; DataError for texts that
        are too short.
    """
    modules = long_term_layers(stage)
    shown = _layer_shown({name: module.long_term.layer for name, module in modules.items()}, layer)
    chosen = cut_texts(texts, stage, chunks)
    # the last token is predicted and not read
    reads = [read_document(stage, torch.tensor(text.ids[:-1])) for text in chosen]
    words = _words(chosen[0].ids, decode, by_token)
    predicted = _token_shown(reads[0][shown], words, token)
    numbers = [module.long_term.layer for module in modules.values()]
    layers = {}
    for name, module in modules.items():
        number = module.long_term.layer
        title = f"layer {number}" if numbers.count(number) == 1 else name
        layers[name] = _layer(
            name, title, module.config.sticky, module.segment, [read[name] for read in reads], words, predicted
        )
    return Analysis(len(chosen), chosen[0].name, tuple(words), tuple(layers.values())), layers[shown]


def _words(ids: Sequence[int], decode: Decode | None, by_token: bool) -> list[Word]:
    """Return the words of a document, or its tokens."""
    if decode is None:
        return number_tokens(ids)
    return split_pieces(ids, decode) if by_token else split_words(ids, decode)


def _layer_shown(numbers: dict[str, int], layer: int | None) -> str:
    """Return the name of the mixer at `layer`. Raises ConfigError where it has no long-term memory."""
    names = [name for name, number in numbers.items() if layer in (None, number)]
    if not names:
        having = ", ".join(map(str, sorted(set(numbers.values()))))
        raise ConfigError(f"--layer {layer}: has no long-term memory; the layers that have one: {having}")
    return names[-1]


def _token_shown(reads: Sequence[Read], words: Sequence[Word], token: int | None) -> int:
    """Return the number of the token whose prediction is shown. Raises ConfigError for one that reads no memory."""
    if token is None:
        last = reads[-1]
        attention = attention_to(last, word_borders(between(words, last.cells.first, last.cells.end), last.cells))
        return last.begin + int(attention.max(1).argmax()) + 1
    if not any(read.begin < token <= read.end for read in reads):
        raise ConfigError(
            f"--token {token}: is not predicted from a long-term memory; give a number from {reads[0].begin + 1:,} to "
            f"{reads[-1].end:,}"
        )
    return token


def word_borders(words: Sequence[Word], cells: Cells) -> Float64:
    """Return where the cells of adjoining words begin, and where the last one ends: [words + 1]."""
    tokens = [word.begin for word in words] + [words[-1].end]
    return cells.borders[np.array(tokens) - cells.first]


def _layer(
    name: str,
    title: str,
    sticky: str,
    chunk: int,
    documents: Sequence[Sequence[Read]],
    words: Sequence[Word],
    predicted: int,
) -> LayerAnalysis:
    """Return the analysis of one layer. documents: what was read in each; `words` are those of the first."""
    last = documents[0][-1]
    attended: list[Word] = []
    attention: Float64 = np.zeros(0)
    for read in documents[0]:
        # none where this layer's memory begins later than that of the layer shown
        if read.begin < predicted <= read.end:
            attended = between(words, read.cells.first, read.cells.end)
            attention = attention_to(read, word_borders(attended, read.cells))[predicted - 1 - read.begin]
    remembered = between(words, last.cells.first, last.cells.end)
    return LayerAnalysis(
        name=name,
        title=title,
        sticky=sticky,
        chunk=chunk,
        histogram=histogram(documents, chunk),
        predicted=predicted,
        attended=tuple(attended),
        attention=attention,
        remembered=tuple(remembered),
        space=np.diff(word_borders(remembered, last.cells)),
        equal_space=np.diff(word_borders(remembered, last.equal)),
        borders=tuple(range(last.cells.first + chunk, last.cells.end, chunk)),
    )
