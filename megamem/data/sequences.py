"""Feeding by sequences whose documents begin at chunk borders: each row of a batch starts with a fresh memory."""

from functools import lru_cache
from typing import Literal

import numpy as np

from megamem.data.order import epoch_order
from megamem.data.rows import DocumentSlice, Row, SourceReport, chunks_of, fill_row
from megamem.data.store import DocumentStore, Int64
from megamem.errors import DataError


class SequencePlan:
    """All sequences of a source and their order in every epoch.

    A document of n tokens has n - 1 positions with a label. Full sequences are cut from its start; the remainder that
    does not fill one is dropped, padded, or packed with other documents' remainders, each at a chunk's border.
    """

    def __init__(
        self,
        store: DocumentStore,
        *,
        sequence_length: int,
        chunk_size: int,
        documents: Literal["drop", "pad", "pack"],
        seed: tuple[int, int],
        shuffle_shards: int = 0,
    ) -> None:
        """Cut a source into sequences.

        Args:
            store: the source.
            sequence_length: tokens of a sequence, a multiple of `chunk_size`.
            chunk_size: tokens of a chunk.
            documents: what happens to remainders.
            seed: the configuration's seed and the source's number.
            shuffle_shards: files shuffled together; 0 shuffles the whole source.

        Raises:
            DataError: no document gives a sequence; the message has the counts.
        """
        self.store = store
        self.chunk_size = chunk_size
        self.seed = seed
        self.shuffle_shards = shuffle_shards
        # the last token of a document is a label only
        usable = np.maximum(store.lengths - 1, 0)
        full = usable // sequence_length
        remainder = usable - full * sequence_length
        document, start, length = _full_sequences(full, sequence_length)
        remainder_document = np.flatnonzero(remainder)
        remaining = remainder[remainder_document]
        first_slices = np.arange(len(document) + 1)
        if documents != "drop":
            if documents == "pack":
                order, slices_per_sequence = pack(chunks_of(remaining, chunk_size), sequence_length // chunk_size)
                remainder_document = remainder_document[order]
            else:
                slices_per_sequence = np.ones(len(remaining), np.int64)
            document = np.concatenate([document, remainder_document])
            start = np.concatenate([start, (full * sequence_length)[remainder_document]])
            length = np.concatenate([length, remainder[remainder_document]])
            first_slices = np.concatenate([first_slices, first_slices[-1] + np.cumsum(slices_per_sequence)])
        self.documents, self.starts, self.lengths = document, start, length
        """[slices] document, first token and number of tokens of every slice, sequence by sequence."""
        self.first_slices = first_slices
        """[sequences + 1] number of each sequence's first slice, and of all slices."""
        self.report = SourceReport(
            path=store.path,
            documents=len(store),
            tokens=int(store.lengths.sum()),
            samples=len(self),
            short_documents=int((usable < sequence_length).sum()),
            dropped_tokens=int(remaining.sum()) if documents == "drop" else 0,
            predicted_tokens=int(length.sum()),
            padded_positions=len(self) * sequence_length - int(length.sum()),
        )
        if len(self) == 0:
            raise DataError(_no_sequence(store, sequence_length, documents))
        first_document = document[first_slices[:-1]]
        self.shard_ids = np.searchsorted(store.shard_borders, first_document, side="right") - 1
        self._order = lru_cache(2)(self._make_order)

    def __len__(self) -> int:
        """Return the number of sequences per epoch."""
        return len(self.first_slices) - 1

    def fill(self, sample: int, row: Row) -> None:
        """Read the source's `sample`-th sequence, counted over all epochs, into `row`."""
        fill_row(self.store, self.slices(sample), self.chunk_size, row)

    def slices(self, sample: int) -> list[DocumentSlice]:
        """Return the slices of the source's `sample`-th sequence, counted over all epochs."""
        epoch, index = divmod(sample, len(self))
        sequence = int(self._order(epoch)[index])
        return [
            DocumentSlice(int(self.documents[i]), int(self.starts[i]), int(self.lengths[i]), position=0)
            for i in range(self.first_slices[sequence], self.first_slices[sequence + 1])
        ]

    def _make_order(self, epoch: int) -> Int64:
        return epoch_order((*self.seed, epoch), self.shard_ids, self.shuffle_shards)


def pack(sizes: Int64, capacity: int) -> tuple[Int64, Int64]:
    """Pack items into bins: the largest first, then whatever still fits.

    Works on the counts of each size, so that millions of items take a few array operations.

    Args:
        sizes: [items] sizes from 1 to `capacity`.
        capacity: size of a bin.

    Returns:
        [items] the items in the order of the bins, and [bins] the number of items of each bin. Items of equal size keep
        their order.
    """
    order: list[Int64] = []
    per_bin: list[Int64] = []
    queues = [np.flatnonzero(sizes == size) for size in range(capacity + 1)]
    while any(len(queue) for queue in queues):
        # how many items of each size the next bin takes
        room, pattern = capacity, {}
        for size in range(capacity, 0, -1):
            if count := min(room // size, len(queues[size])):
                pattern[size] = count
                room -= count * size
        # as many bins of the same pattern as there are items for
        times = min(len(queues[size]) // count for size, count in pattern.items())
        taken = [queues[size][: times * count].reshape(times, count) for size, count in pattern.items()]
        order.append(np.concatenate(taken, axis=1).reshape(-1))
        per_bin.append(np.full(times, sum(pattern.values())))
        for size, count in pattern.items():
            queues[size] = queues[size][times * count :]
    empty = np.zeros(0, np.int64)
    return np.concatenate([empty, *order]), np.concatenate([empty, *per_bin])


def _full_sequences(full: Int64, sequence_length: int) -> tuple[Int64, Int64, Int64]:
    """Return document, first token and length of all full sequences, each [sequences]. full: [documents] counts."""
    document = np.repeat(np.arange(len(full)), full)
    number_in_document = np.arange(len(document)) - np.repeat(np.cumsum(full) - full, full)
    return document, number_in_document * sequence_length, np.full(len(document), sequence_length)


def _no_sequence(store: DocumentStore, sequence_length: int, documents: str) -> str:
    """Return the message for a source that gives no sequence."""
    if documents != "drop":
        return f"{store.path}: none of its {len(store)} documents has two tokens"
    return (
        f"{store.path}: no document is long enough: all {len(store)} are shorter than a sequence of "
        f"{sequence_length} tokens and the one that follows (longest: {int(store.lengths.max())}); "
        f"shorten data.sequence_length or set data.documents to join, pad or pack"
    )
