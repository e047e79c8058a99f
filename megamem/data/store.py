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
    """[documents] number of tokens of each document, its end-of-document token included."""
    shard_ids: Int64
    """[documents] number of the file each document lies in, ascending."""
    text_bytes: Int64 | None
    """[documents] UTF-8 bytes of each document's text, where known."""
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
