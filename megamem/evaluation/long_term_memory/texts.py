"""The documents that an analysis reads, cut to what fills the long-term memories."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megamem.data.batch import EvaluationDocument
from megamem.errors import DataError
from megamem.evaluation.long_term_memory.reads import long_term_layers
from megamem.evaluation.texts import Text, long_texts
from megamem.model.stage import Stage


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
    return long_texts(documents, least_tokens(stage), most_tokens(stage, chunks), count)
