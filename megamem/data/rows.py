"""Rows of a batch, filled from slices of documents in whole chunks, and what a source gives to training."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from megamem.data.batch import IGNORED
from megamem.data.store import DocumentStore, Int64


@dataclass
class Row:
    """One row of a batch, or consecutive chunks of one: arrays that are overwritten when it is filled."""

    tokens: Int64
    """[tokens] what is read."""
    labels: Int64
    """[tokens] what is to be predicted, `IGNORED` where nothing is."""
    starts: Int64
    """[chunks] position of each chunk's first token since the memory was reset."""
    begins: npt.NDArray[np.bool_] | None = None
    """[tokens] where the memory is reset, if that may be inside a chunk."""
    padding: int = 0
    """Positions that no document fills."""

    @classmethod
    def empty(cls, length: int, chunk_size: int, *, begins: bool = False) -> "Row":
        """Make an unfilled row of `length` tokens."""
        return cls(
            tokens=np.empty(length, np.int64),
            labels=np.empty(length, np.int64),
            starts=np.empty(length // chunk_size, np.int64),
            begins=np.empty(length, np.bool_) if begins else None,
        )

    def part(self, start: int, stop: int, chunk_size: int) -> "Row":
        """Return the row's tokens `start` to `stop` - 1, whole chunks, as a row over the same memory."""
        return Row(
            tokens=self.tokens[start:stop],
            labels=self.labels[start:stop],
            starts=self.starts[start // chunk_size : stop // chunk_size],
            begins=None if self.begins is None else self.begins[start:stop],
        )


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
    """Documents shorter than a sequence (feeding `sequences`) or without a single label (`streams`); 0 if joined."""
    dropped_tokens: int
    """Tokens that could be read with a label and are left out."""
    predicted_tokens: int
    """Tokens that are read with a label; of a task's, only some have one. Lanes whose documents are not joined leave
    out other tokens in each epoch: these are the figures of the first."""
    padded_positions: int
    """Positions of padding: all others of an epoch."""

    @property
    def padding_share(self) -> Fraction:
        """Padding over all positions."""
        return Fraction(self.padded_positions, self.predicted_tokens + self.padded_positions)

    def summary(self) -> str:
        """Describe the source in one line for people."""
        return (
            f"{self.path}: {self.documents:,} documents, {self.tokens:,} tokens, {self.samples:,} rows an epoch; "
            f"{self.short_documents:,} short documents, {self.dropped_tokens:,} tokens left out, "
            f"{self.padded_positions:,} positions of padding ({float(self.padding_share):.1%})"
        )


def chunks_of(tokens: Int64, chunk_size: int) -> Int64:
    """Return how many whole chunks hold `tokens` [documents] tokens, for each document."""
    return -(-tokens // chunk_size)


def fill_row(store: DocumentStore, slices: Sequence[DocumentSlice], chunk_size: int, row: Row) -> None:
    """Read slices of documents into one row.

    Padding is token 0 with label `IGNORED`. Empty chunks at the end of the row count on from the last slice, so that
    their positions stay those of its document.

    Args:
        store: the source of the slices.
        slices: what the row holds, in order.
        chunk_size: tokens of a chunk.
        row: overwritten.
    """
    row.tokens[:] = 0
    row.labels[:] = IGNORED
    at = 0
    for document_slice in slices:
        length, start = document_slice.length, document_slice.start
        row.tokens[at : at + length] = store.tokens(document_slice.document, start, start + length)
        row.labels[at : at + length] = store.labels(document_slice.document, start, start + length)
        # to the end of the row: the next slice, if there is one, overwrites what is its own
        chunks_left = len(row.starts) - at // chunk_size
        row.starts[at // chunk_size :] = document_slice.position + chunk_size * np.arange(chunks_left)
        at += -(-length // chunk_size) * chunk_size
    row.padding = len(row.tokens) - sum(document_slice.length for document_slice in slices)
