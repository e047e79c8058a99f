"""Feeding by streams whose documents begin at chunk borders: lanes read on and keep their memory between steps."""

from functools import lru_cache

import numpy as np

from megamem.data.order import epoch_order
from megamem.data.rows import DocumentSlice, Row, SourceReport, chunks_of, fill_row
from megamem.data.store import DocumentStore, Int64
from megamem.errors import DataError


class StreamPlan:
    """The stretch of text each lane reads at each step.

    An epoch is the list of all chunks of all documents, the documents in random order. It is cut into `lanes`
    contiguous parts of equal length; fewer than `lanes` chunks at its end are left out. A lane that reaches the
    end of its part goes on with its part of the next epoch. A memory is reset where a document starts and where
    a lane's part starts, which may be in mid-document.
    """

    def __init__(
        self,
        store: DocumentStore,
        *,
        chunk_size: int,
        chunks_per_step: int,
        lanes: int,
        seed: tuple[int, int],
        shuffle_shards: int = 0,
    ) -> None:
        """Deal a source out to lanes.

        Args:
            store: the source.
            chunk_size: tokens of a chunk.
            chunks_per_step: chunks that a lane reads in an optimizer step.
            lanes: lanes of this source.
            seed: the configuration's seed and the source's number.
            shuffle_shards: files shuffled together; 0 shuffles the whole source.

        Raises:
            DataError: the source has fewer chunks than lanes.
        """
        self.store = store
        self.chunk_size = chunk_size
        self.chunks_per_step = chunks_per_step
        self.seed = seed
        self.shuffle_shards = shuffle_shards
        # the last token of a document is a label only
        self.usable = np.maximum(store.lengths - 1, 0)
        self.chunks = chunks_of(self.usable, chunk_size)
        total = int(self.chunks.sum())
        self.lane_chunks = total // lanes
        if self.lane_chunks == 0:
            raise DataError(
                f"{store.path}: {total} chunks of {chunk_size} tokens in {len(store)} documents do not fill "
                f"{lanes} lanes; use fewer rows or a smaller chunk"
            )
        self._epoch = lru_cache(2)(self._make_epoch)
        read, predicted = self.lane_chunks * lanes, self._predicted(self.lane_chunks * lanes)
        self.report = SourceReport(
            path=store.path,
            documents=len(store),
            tokens=int(store.lengths.sum()),
            samples=read // chunks_per_step,
            short_documents=int((self.usable == 0).sum()),
            dropped_tokens=int(self.usable.sum()) - predicted,
            predicted_tokens=predicted,
            padded_positions=read * chunk_size - predicted,
        )

    def fill(self, lane: int, step: int, row: Row) -> None:
        """Read what `lane` reads at `step` into `row`."""
        fill_row(self.store, self.slices(lane, step), self.chunk_size, row)

    def slices(self, lane: int, step: int) -> list[DocumentSlice]:
        """Return what `lane` reads at `step`: slices that fill `chunks_per_step` chunks."""
        at, end = step * self.chunks_per_step, (step + 1) * self.chunks_per_step
        slices = []
        while at < end:
            document_slice, chunks = self._slice_at(lane, at, end - at)
            slices.append(document_slice)
            at += chunks
        return slices

    def _slice_at(self, lane: int, at: int, most: int) -> tuple[DocumentSlice, int]:
        """Return the slice that begins at the lane's chunk `at`, and its number of chunks, at most `most`."""
        epoch, offset = divmod(at, self.lane_chunks)
        order, ends = self._epoch(epoch)
        lane_start = lane * self.lane_chunks
        # the document that holds the epoch's chunk `lane_start + offset`
        place = int(np.searchsorted(ends, lane_start + offset, side="right"))
        document = int(order[place])
        document_start = int(ends[place] - self.chunks[document])
        within = lane_start + offset - document_start
        # up to the end of the document, of the lane's part, or of the step
        chunks = min(int(self.chunks[document]) - within, self.lane_chunks - offset, most)
        start = within * self.chunk_size
        length = min(chunks * self.chunk_size, int(self.usable[document]) - start)
        # the memory was reset where the document or the lane's part began, whichever came later
        position = min(within, offset) * self.chunk_size
        return DocumentSlice(document, start, length, position), chunks

    def _predicted(self, chunks: int) -> int:
        """Return the tokens with a label in the first `chunks` chunks of the first epoch."""
        order, ends = self._epoch(0)
        place = int(np.searchsorted(ends, chunks, side="right"))
        if place == len(order):
            return int(self.usable.sum())
        document = order[place]
        chunks_within = chunks - int(ends[place] - self.chunks[document])
        return int(self.usable[order[:place]].sum()) + min(chunks_within * self.chunk_size, int(self.usable[document]))

    def _make_epoch(self, epoch: int) -> tuple[Int64, Int64]:
        """Return the documents in the epoch's order and the end of each in its list of chunks, both [documents]."""
        borders = self.store.shard_borders
        shard_ids = np.repeat(np.arange(len(borders) - 1), np.diff(borders))
        order = epoch_order((*self.seed, epoch), shard_ids, self.shuffle_shards)
        return order, np.cumsum(self.chunks[order])
