"""The documents that an analysis reads: those that are long enough for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megamem.data.batch import IGNORED, EvaluationDocument
from megamem.errors import DataError


@dataclass(frozen=True)
class Text:
    """A document to read."""

    name: str
    ids: tuple[int, ...]
    """Its tokens."""


def long_texts(documents: Iterable[EvaluationDocument], least: int, most: int, count: int) -> list[Text]:
    """Return the first `count` documents of `most` tokens; where there are fewer, the longest besides.

    Raises: DataError where no document has `least` tokens, with which a memory is read.
    """
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
