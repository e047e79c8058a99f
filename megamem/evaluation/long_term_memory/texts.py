"""The documents that an analysis reads, cut to what fills the long-term memories."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megamem.data.batch import IGNORED, EvaluationDocument
from megamem.errors import DataError
from megamem.evaluation.long_term_memory.reads import long_term_layers
from megamem.model.stage import Stage


@dataclass(frozen=True)
class Text:
    """A document to read."""

    name: str
    ids: tuple[int, ...]
    """Its tokens."""


def least_tokens(stage: Stage) -> int:
    """Return the tokens of the shortest document in which each long-term memory is read: one reads, one is predicted.

    Raises: see `long_term_layers`.
    """
    layers = long_term_layers(stage).values()
    return max(layer.segment + (layer.config.short_memory or 0) for layer in layers) + 2


def most_tokens(stage: Stage, chunks: int) -> int:
    """Return the tokens of a document that puts `chunks` chunks into each memory, and reads them with another one."""
    return least_tokens(stage) + chunks * stage.config.chunk_size - 1


def cut_texts(texts: Sequence[Text], stage: Stage, chunks: int) -> list[Text]:
    """Return texts cut to `most_tokens`, the longest first. Raises DataError for one that reads no memory."""
    least, most = least_tokens(stage), most_tokens(stage, chunks)
    for text in texts:
        if len(text.ids) < least:
            raise DataError(
                f"{text.name}: {len(text.ids):,} tokens, but a long-term memory is not read before the second chunk; "
                f"give a text of at least {least:,} tokens"
            )
    return sorted((Text(text.name, text.ids[:most]) for text in texts), key=lambda text: -len(text.ids))


def held_out_texts(documents: Iterable[EvaluationDocument], stage: Stage, chunks: int, count: int) -> list[Text]:
    """Return the first `count` documents that fill the memories; where there are fewer, the longest besides.

    Raises: DataError where no document is long enough for a memory to be read.
    """
    least, most = least_tokens(stage), most_tokens(stage, chunks)
    full: list[Text] = []
    shorter: list[Text] = []
    for document in documents:
        text = _text(document)
        if len(text.ids) >= most:
            full.append(text)
        elif len(text.ids) >= least:
            shorter = sorted([*shorter, text], key=lambda text: -len(text.ids))[:count]
        if len(full) == count:
            break
    if not full and not shorter:
        raise DataError(f"data.validation: no document has {least:,} tokens, the fewest with which a memory is read")
    return [*full, *shorter][:count]


def _text(document: EvaluationDocument) -> Text:
    """Return a held-out document without its padding."""
    last = int(document.labels[document.predicted_tokens - 1])
    ids = document.tokens[: document.predicted_tokens].tolist()
    return Text(document.name, tuple(ids if last == IGNORED else [*ids, last]))
