"""Rows of a batch as pieces of documents, in whole chunks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megamem.data.batch import IGNORED
from megamem.data.store import DocumentStore, Int64


@dataclass(frozen=True)
class Piece:
    """A stretch of one document. It begins at a chunk's border and takes whole chunks of its row."""

    document: int
    start: int
    """First token read."""
    length: int
    """Tokens read; each has a label, which may be `IGNORED`."""
    position: int
    """Position of the first token since the memory was reset; 0 = it is reset here."""


@dataclass(frozen=True)
class SourceReport:
    """What a source gives to training, per epoch."""

    path: str
    documents: int
    tokens: int
    samples: int
    """Rows of `sequence_length` per epoch."""
    short_documents: int
    """Documents shorter than a window (windows) or without a single label (streams)."""
    dropped_tokens: int
    """Tokens that could be read with a label and are left out."""
    padded_positions: int
    """Positions without a label."""

    def summary(self) -> str:
        """One line for people."""
        return (
            f"{self.path}: {self.documents:,} documents, {self.tokens:,} tokens, {self.samples:,} rows an epoch; "
            f"{self.short_documents:,} short documents, {self.dropped_tokens:,} tokens left out, "
            f"{self.padded_positions:,} positions of padding"
        )


def chunks_of(tokens: Int64, chunk: int) -> Int64:
    """Whole chunks that hold `tokens`."""
    return -(-tokens // chunk)


def fill_row(
    store: DocumentStore, pieces: Sequence[Piece], chunk: int, tokens: Int64, labels: Int64, starts: Int64
) -> None:
    """Read `pieces` into one row: `tokens` and `labels` [sequence], `starts` [chunks], all overwritten.

    Padding is token 0 with label `IGNORED`; empty chunks at the end count on from the last piece.
    """
    tokens[:] = 0
    labels[:] = IGNORED
    at = 0
    for piece in pieces:
        stop = piece.start + piece.length
        tokens[at : at + piece.length] = store.tokens(piece.document, piece.start, stop)
        labels[at : at + piece.length] = store.labels(piece.document, piece.start, stop)
        rest = len(starts) - at // chunk
        starts[at // chunk :] = piece.position + chunk * np.arange(rest)
        at += -(-piece.length // chunk) * chunk
