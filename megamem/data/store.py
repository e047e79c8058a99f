"""The interface of stores of tokenized documents: random access to the tokens of each."""

from typing import Protocol

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]


class DocumentStore(Protocol):
    """Random access to the tokens of documents."""

    path: str
    """The source as the configuration names it."""
    lengths: Int64
    """[documents] number of tokens of each document, its end included. May lie in a mapped file: read what you need."""
    shard_borders: Int64
    """[files + 1] number of the first document in each file, and of all documents."""
    end_of_document: int | None
    """The token that ends every document, where known."""
    fingerprint: str
    """SHA-256 that identifies the tokens."""
    vocab_size: int | None
    """Bound of the token ids, where known."""
    tokenizer_hash: str | None
    """SHA-256 of the tokenizer's file, where known."""

    def __len__(self) -> int:
        """Return the number of documents."""

    def tokens(self, document: int, start: int, stop: int) -> Int64:
        """Return tokens `start` to `stop` - 1 of a document, [stop - start]."""

    def labels(self, document: int, start: int, stop: int) -> Int64:
        """Return what is to be predicted after each of these tokens: the next one, or what a task wants."""

    def name(self, document: int) -> str:
        """Return the document's name."""
