"""Rows of a batch, filled from slices of documents in whole chunks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megamem.data.batch import IGNORED
from megamem.data.store import DocumentStore, Int64


@dataclass(frozen=True)
class DocumentSlice:
    """A stretch of one document. It begins at a chunk's border of its row and takes whole chunks of it."""

    document: int
    """Number of the document within its source."""
    start: int
    """First token that is read."""
    length: int
    """Number of tokens read; each has a label, which may be `IGNORED`."""
    position: int
    """Position of the first token since the memory was reset; 0 = it is reset here."""


@dataclass(frozen=True)
class SourceReport:
    """What a source gives to training, per epoch."""

    path: str
    """The source as the configuration names it."""
    documents: int
    """Number of documents."""
    tokens: int
    """Number of tokens, the end of each document included."""
    samples: int
    """Rows of `sequence_length` tokens."""
    short_documents: int
    """Documents shorter than a sequence (feeding `sequences`) or without a single label (`streams`)."""
    dropped_tokens: int
    """Tokens that could be read with a label and are left out."""
    padded_positions: int
    """Positions without a label."""

    def summary(self) -> str:
        """Describe the source in one line for people."""
        return (
            f"{self.path}: {self.documents:,} documents, {self.tokens:,} tokens, {self.samples:,} rows an epoch; "
            f"{self.short_documents:,} short documents, {self.dropped_tokens:,} tokens left out, "
            f"{self.padded_positions:,} positions of padding"
        )


def chunks_of(tokens: Int64, chunk_size: int) -> Int64:
    """Return how many whole chunks hold `tokens` [documents] tokens, for each document."""
    return -(-tokens // chunk_size)


def fill_row(
    store: DocumentStore,
    slices: Sequence[DocumentSlice],
    chunk_size: int,
    tokens: Int64,
    labels: Int64,
    starts: Int64,
) -> None:
    """Read slices of documents into one row.

    Padding is token 0 with label `IGNORED`. Empty chunks at the end of the row count on from the last slice, so that
    their positions stay those of its document.

    Args:
        store: the source of the slices.
        slices: what the row holds, in order.
        chunk_size: tokens of a chunk.
        tokens: [tokens] int64, overwritten.
        labels: [tokens] int64, overwritten.
        starts: [chunks] int64, position of each chunk's first token, overwritten.
    """
    tokens[:] = 0
    labels[:] = IGNORED
    at = 0
    for document_slice in slices:
        length, start = document_slice.length, document_slice.start
        tokens[at : at + length] = store.tokens(document_slice.document, start, start + length)
        labels[at : at + length] = store.labels(document_slice.document, start, start + length)
        # to the end of the row: the next slice, if there is one, overwrites what is its own
        chunks_left = len(starts) - at // chunk_size
        starts[at // chunk_size :] = document_slice.position + chunk_size * np.arange(chunks_left)
        at += -(-length // chunk_size) * chunk_size
