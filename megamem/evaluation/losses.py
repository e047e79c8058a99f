"""Losses of held-out documents: which of them are read, how far, and the report of what the model made of them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, islice
from typing import Any

import numpy as np

from megamem.data.batch import IGNORED, EvaluationDocument
from megamem.errors import DataError
from megamem.evaluation.reading import Float64, Int64, Reading, Sums
from tokenization.text_size import TextCounter, TextSize

LEAST_CHUNKS = 8
"""A bound on tokens never cuts a document below this depth while it can leave out documents instead."""
WITHIN_BUCKETS = 32


@dataclass(frozen=True)
class Bucket:
    """Mean loss of a range of chunks or positions."""

    first: int
    last: int
    """Inclusive."""
    tokens: int
    """Scored tokens."""
    loss: float | None
    """Nats per token; None without tokens."""


@dataclass(frozen=True)
class DocumentLoss:
    """One document's figures."""

    name: str
    tokens: int
    """Scored tokens."""
    loss: float | None
    """Nats per token; None without tokens."""
    bits_per_byte: float | None
    correct: int
    """Scored tokens whose label was the most probable."""
    chunk_nats: tuple[float, ...]
    """Summed cross-entropy of each of its chunks."""
    chunk_tokens: tuple[int, ...]
    """Scored tokens of each of its chunks."""


@dataclass(frozen=True)
class LossReport:
    """Figures of held-out documents, the same on all ranks."""

    tokens: int
    """Predicted tokens."""
    nats: float
    """Summed cross-entropy."""
    text_size: TextSize | None
    """Bytes, characters, words and line breaks of the predicted tokens' text. None without a tokenizer."""
    loss: float
    """Nats per token."""
    perplexity: float
    """exp(loss)."""
    bits_per_byte: float | None
    """nats / ln 2 / bytes; None where the text's size is not known, as the next three."""
    bits_per_character: float | None
    """nats / ln 2 / characters."""
    word_perplexity: float | None
    """exp(nats / words)."""
    word_perplexity_with_line_ends: float | None
    """exp(nats / (words + line breaks)): the end of a line counts as a word."""
    accuracy: float
    """Share of the predicted tokens that were the most probable."""
    exact_match: float
    """Share of the documents of which every predicted token was: of a task, the examples solved."""
    by_chunk: tuple[Bucket, ...]
    """Buckets by index of the chunk in its document, from 0 (`first` == `last`)."""
    by_position: tuple[Bucket, ...]
    """Buckets by position in the document. Position n: the prediction made after reading n tokens of it."""
    within_chunk: tuple[Bucket, ...]
    """Buckets by position inside the chunk, from 1, over all chunks."""
    first_chunk_loss: float | None
    """Nats per token in the documents' first chunks, before any memory exists; None if nothing is predicted there."""
    beyond_first_chunk_loss: float | None
    """Nats per token everywhere else; None if no document is longer than a chunk."""
    text_sha256: str
    """Hash of all tokens and labels: what reports of the same text in the same chunks have in common."""
    documents: tuple[DocumentLoss, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return asdict(self)


def whole_readings(documents: Sequence[EvaluationDocument], size: int) -> list[Reading]:
    """Each document from start to end; slots number the chunks of all documents in order."""
    slots = first_slots(documents, size)
    return [
        Reading(document, 0, len(document.tokens) // size, slot)
        for document, slot in zip(documents, slots, strict=True)
    ]


def first_slots(documents: Sequence[EvaluationDocument], size: int) -> list[int]:
    """Return the number of chunks before each document."""
    return list(accumulate((len(document.tokens) // size for document in documents), initial=0))[:-1]


def cut_documents(
    documents: Iterable[EvaluationDocument],
    size: int,
    max_tokens: int | None,
    counter: TextCounter | None = None,
    least: int = LEAST_CHUNKS,
) -> list[EvaluationDocument]:
    """Return the documents, cut so that at most `max_tokens` tokens are predicted (but at least one chunk).

    All documents are cut to the same depth in whole chunks, the deepest that fits. Where that is less than
    `least`, documents are cut to `least` chunks and taken in order while they fit. The text of a
    cut document is measured by `counter`, and its size is not known without. Where a document asks for
    some of its tokens only (a task), its question must not be cut off: whole documents are taken while they fit.

    Documents are gone through twice, and what is not returned is not kept in memory.
    """
    documents = list(documents) if isinstance(documents, Iterator) else documents
    lengths, predict_all = _survey(documents, size)
    if max_tokens is None or lengths.sum() <= max_tokens:
        return list(_readable(documents))
    if not predict_all:
        taken = int(np.searchsorted(lengths.cumsum(), max_tokens, side="right"))
        return list(islice(_readable(documents), max(taken, 1)))
    depth, taken = _common_depth(lengths, size, max_tokens), len(lengths)
    if depth < least:
        depth = min(least, max(max_tokens // size, 1))
        taken = int(np.searchsorted(np.minimum(lengths, depth * size).cumsum(), max_tokens, side="right"))
    return [_cut(document, depth * size, counter) for document in islice(_readable(documents), max(taken, 1))]


def _readable(documents: Iterable[EvaluationDocument]) -> Iterator[EvaluationDocument]:
    """Go through the documents that have a token to predict."""
    return (document for document in documents if document.predicted_tokens > 0)


def _survey(documents: Iterable[EvaluationDocument], size: int) -> tuple[Int64, bool]:
    """Return [documents] the predicted tokens of each readable document, and whether all predict every token."""
    lengths, predict_all = [], True
    for document in _readable(documents):
        if len(document.tokens) % size or len(document.labels) != len(document.tokens):
            raise ValueError(f"{document.name}: {len(document.tokens)} tokens are not whole chunks of {size}")
        lengths.append(document.predicted_tokens)
        predict_all = predict_all and document.predicts_all
    if not lengths:
        raise DataError("evaluation: no held-out document has a token to predict")
    return np.array(lengths, dtype=np.int64), predict_all


def _common_depth(lengths: Int64, size: int, max_tokens: int) -> int:
    """Most chunks to which all documents can be cut within the bound."""
    low, high = 0, -(-int(lengths.max()) // size)
    while low < high:
        middle = (low + high + 1) // 2
        if np.minimum(lengths, middle * size).sum() <= max_tokens:
            low = middle
        else:
            high = middle - 1
    return low


def _cut(document: EvaluationDocument, tokens: int, counter: TextCounter | None) -> EvaluationDocument:
    if document.predicted_tokens <= tokens:
        return document
    # copies: slices would keep the whole document
    labels = document.labels[:tokens].clone()
    return replace(
        document,
        tokens=document.tokens[:tokens].clone(),
        labels=labels,
        predicted_tokens=tokens,
        text_size=None if counter is None else counter.count(labels[labels != IGNORED].numpy()),
    )


def loss_report(documents: Sequence[EvaluationDocument], sums: Sums, size: int) -> LossReport:
    """Return the report from the sums over `whole_readings(documents, size)` (or of the same chunks read otherwise)."""
    slots = [*first_slots(documents, size), sums.slots.shape[1]]
    tables = [sums.slots[:, first:last] for first, last in zip(slots[:-1], slots[1:], strict=True)]
    by_chunk = np.zeros((3, max(table.shape[1] for table in tables)))
    for table in tables:
        by_chunk[:, : table.shape[1]] += table
    total = by_chunk.sum(1)
    text_size = TextSize.sum(document.text_size for document in documents)
    first = np.concatenate(([0], sums.edges[:-1])) + 1
    groups = np.unique(np.linspace(0, size, min(size, WITHIN_BUCKETS) + 1).round().astype(np.int64))
    return LossReport(
        tokens=int(total[1]),
        nats=float(total[0]),
        text_size=text_size,
        loss=float(total[0] / total[1]),
        perplexity=perplexity(float(total[0] / total[1])),
        bits_per_byte=bits_per_byte(float(total[0]), text_size),
        bits_per_character=bits_per_character(float(total[0]), text_size),
        word_perplexity=word_perplexity(float(total[0]), text_size),
        word_perplexity_with_line_ends=word_perplexity_with_line_ends(float(total[0]), text_size),
        accuracy=float(total[2] / total[1]),
        exact_match=float(np.mean([right == asked for _, asked, right in (table.sum(1) for table in tables) if asked])),
        by_chunk=tuple(_bucket(i, i, column) for i, column in enumerate(by_chunk.T)),
        by_position=tuple(
            _bucket(int(a), int(b), column) for a, b, column in zip(first, sums.edges, sums.positions.T, strict=True)
        ),
        within_chunk=tuple(
            _bucket(int(a) + 1, int(b), sums.within[:, a:b].sum(1))
            for a, b in zip(groups[:-1], groups[1:], strict=True)
        ),
        first_chunk_loss=mean(by_chunk[:, 0]),
        beyond_first_chunk_loss=mean(by_chunk[:, 1:].sum(1)),
        text_sha256=text_sha256(documents),
        documents=tuple(_document_loss(document, table) for document, table in zip(documents, tables, strict=True)),
    )


def text_sha256(documents: Sequence[EvaluationDocument]) -> str:
    """Return the hash of all tokens and labels [T] of documents, whose lengths are part of it."""
    found = hashlib.sha256()
    for document in documents:
        found.update(f"{document.predicted_tokens} ".encode())
        for part in (document.tokens, document.labels):
            found.update(part.contiguous().numpy().tobytes())
    return found.hexdigest()


def _document_loss(document: EvaluationDocument, table: Float64) -> DocumentLoss:
    """Return a document's figures from its sums [3, chunks]."""
    total = table.sum(1)
    return DocumentLoss(
        name=document.name,
        tokens=int(total[1]),
        loss=mean(total),
        bits_per_byte=bits_per_byte(float(total[0]), document.text_size),
        correct=int(total[2]),
        chunk_nats=tuple(table[0].tolist()),
        chunk_tokens=tuple(int(tokens) for tokens in table[1]),
    )


def _bucket(first: int, last: int, total: Float64) -> Bucket:
    return Bucket(first, last, int(total[1]), mean(total))


def mean(total: Float64) -> float | None:
    """Nats per token of (nats, tokens, ...); None without tokens."""
    return float(total[0] / total[1]) if total[1] else None


def perplexity(loss: float) -> float:
    """exp(loss); infinite where that is beyond a float."""
    return math.exp(loss) if loss < 700 or math.isnan(loss) else math.inf


def bits_per_byte(nats: float, size: TextSize | None) -> float | None:
    """Nats in bits over bytes; None if there are none or their number is not known."""
    return nats / math.log(2) / size.bytes if size and size.bytes else None


def bits_per_character(nats: float, size: TextSize | None) -> float | None:
    """Nats in bits over characters; None if there are none or their number is not known."""
    return nats / math.log(2) / size.characters if size and size.characters else None


def word_perplexity(nats: float, size: TextSize | None) -> float | None:
    """exp(nats over words); None if there are none or their number is not known."""
    return perplexity(nats / size.words) if size and size.words else None


def word_perplexity_with_line_ends(nats: float, size: TextSize | None) -> float | None:
    """exp(nats over words and line breaks); None if there are none or their number is not known."""
    return perplexity(nats / (size.words + size.lines)) if size and size.words + size.lines else None
