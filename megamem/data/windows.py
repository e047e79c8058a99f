"""Windows: sequences of fixed length that each start with a fresh memory."""

from functools import lru_cache
from typing import Literal

import numpy as np

from megamem.data.order import epoch_order
from megamem.data.rows import Piece, SourceReport, chunks_of
from megamem.data.store import DocumentStore, Int64
from megamem.errors import DataError


class WindowPlan:
    """All windows of a source and their order in every epoch.

    A document of n tokens has n - 1 positions with a label. Whole windows are cut from its start; what does not
    fill a window is dropped, padded, or packed with others' rests, each rest beginning at a chunk's border.
    """

    def __init__(
        self,
        store: DocumentStore,
        *,
        sequence_length: int,
        chunk: int,
        short_documents: Literal["drop", "pad", "pack"],
        seed: tuple[int, int],
        shuffle_shards: int = 0,
    ) -> None:
        """Raises DataError with the counts where no document gives a window."""
        self.seed = seed
        self.shuffle_shards = shuffle_shards
        usable = np.maximum(store.lengths - 1, 0)
        whole = usable // sequence_length
        rest = usable - whole * sequence_length
        document, start, length = _whole_windows(whole, sequence_length)
        rest_document = np.flatnonzero(rest)
        left = rest[rest_document]
        windows = np.arange(len(document) + 1)
        if short_documents != "drop":
            if short_documents == "pack":
                order, sizes = pack(chunks_of(left, chunk), sequence_length // chunk)
                rest_document = rest_document[order]
            else:
                sizes = np.ones(len(left), np.int64)
            document = np.concatenate([document, rest_document])
            start = np.concatenate([start, (whole * sequence_length)[rest_document]])
            length = np.concatenate([length, rest[rest_document]])
            windows = np.concatenate([windows, windows[-1] + np.cumsum(sizes)])
        self.documents, self.starts, self.lengths = document, start, length  # [pieces]
        self.first_pieces = windows  # [windows + 1]
        self.report = SourceReport(
            path=store.path,
            documents=len(store),
            tokens=int(store.lengths.sum()),
            samples=len(self),
            short_documents=int((usable < sequence_length).sum()),
            dropped_tokens=int(left.sum()) if short_documents == "drop" else 0,
            padded_positions=len(self) * sequence_length - int(length.sum()),
        )
        if len(self) == 0:
            raise DataError(_no_window(store, sequence_length, short_documents))
        self.shard_ids = store.shard_ids[document[windows[:-1]]]
        self._order = lru_cache(2)(self._make_order)

    def __len__(self) -> int:
        """Windows per epoch."""
        return len(self.first_pieces) - 1

    def pieces(self, sample: int) -> list[Piece]:
        """The pieces of the source's `sample`-th window, counted over all epochs."""
        epoch, index = divmod(sample, len(self))
        window = int(self._order(epoch)[index])
        return [
            Piece(int(self.documents[i]), int(self.starts[i]), int(self.lengths[i]), position=0)
            for i in range(self.first_pieces[window], self.first_pieces[window + 1])
        ]

    def _make_order(self, epoch: int) -> Int64:
        return epoch_order((*self.seed, epoch), self.shard_ids, self.shuffle_shards)


def pack(sizes: Int64, capacity: int) -> tuple[Int64, Int64]:
    """Pack items of `sizes` [items] (1..capacity) into bins: largest first, then whatever still fits.

    Returns the items in bin order and the number of items of each bin. Items of equal size keep their order.
    Works on the counts of each size, so that millions of items take a few array operations.
    """
    order: list[Int64] = []
    per_bin: list[Int64] = []
    queues = [np.flatnonzero(sizes == size) for size in range(capacity + 1)]
    while any(len(queue) for queue in queues):
        room, pattern = capacity, {}
        for size in range(capacity, 0, -1):
            if count := min(room // size, len(queues[size])):
                pattern[size] = count
                room -= count * size
        times = min(len(queues[size]) // count for size, count in pattern.items())
        taken = [queues[size][: times * count].reshape(times, count) for size, count in pattern.items()]
        order.append(np.concatenate(taken, axis=1).reshape(-1))
        per_bin.append(np.full(times, sum(pattern.values())))
        for size, count in pattern.items():
            queues[size] = queues[size][times * count :]
    empty = np.zeros(0, np.int64)
    return np.concatenate([empty, *order]), np.concatenate([empty, *per_bin])


def _whole_windows(whole: Int64, sequence_length: int) -> tuple[Int64, Int64, Int64]:
    """Document, first token and length [windows] of all full windows."""
    document = np.repeat(np.arange(len(whole)), whole)
    number = np.arange(len(document)) - np.repeat(np.cumsum(whole) - whole, whole)
    return document, number * sequence_length, np.full(len(document), sequence_length)


def _no_window(store: DocumentStore, sequence_length: int, short_documents: str) -> str:
    if short_documents != "drop":
        return f"{store.path}: none of its {len(store)} documents has two tokens"
    return (
        f"{store.path}: no document is long enough: all {len(store)} are shorter than a window of "
        f"{sequence_length} tokens and the one that follows (longest: {int(store.lengths.max())}); "
        f"shorten data.sequence_length or set data.short_documents to pad or pack"
    )
