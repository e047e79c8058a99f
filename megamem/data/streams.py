"""Streams: every row of the batch (a lane) reads on through long text and keeps its memory between steps."""

from functools import lru_cache

import numpy as np

from megamem.data.order import epoch_order
from megamem.data.rows import Piece, SourceReport, chunks_of
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
        chunk: int,
        chunks_per_step: int,
        lanes: int,
        seed: tuple[int, int],
        shuffle_shards: int = 0,
    ) -> None:
        """Raises DataError where the source has fewer chunks than lanes."""
        self.store = store
        self.chunk = chunk
        self.chunks_per_step = chunks_per_step
        self.seed = seed
        self.shuffle_shards = shuffle_shards
        self.usable = np.maximum(store.lengths - 1, 0)
        self.chunks = chunks_of(self.usable, chunk)
        total = int(self.chunks.sum())
        self.lane_chunks = total // lanes
        if self.lane_chunks == 0:
            raise DataError(
                f"{store.path}: {total} chunks of {chunk} tokens in {len(store)} documents do not fill "
                f"{lanes} lanes; use fewer rows or a smaller chunk"
            )
        self.report = SourceReport(
            path=store.path,
            documents=len(store),
            tokens=int(store.lengths.sum()),
            samples=self.lane_chunks * lanes // chunks_per_step,
            short_documents=int((self.usable == 0).sum()),
            dropped_tokens=(total - self.lane_chunks * lanes) * chunk,
            padded_positions=total * chunk - int(self.usable.sum()),
        )
        self._epoch = lru_cache(2)(self._make_epoch)

    def pieces(self, lane: int, step: int) -> list[Piece]:
        """What `lane` reads at `step`: pieces that fill `chunks_per_step` chunks."""
        at, end = step * self.chunks_per_step, (step + 1) * self.chunks_per_step
        pieces = []
        while at < end:
            piece, taken = self._piece(lane, at, end - at)
            pieces.append(piece)
            at += taken
        return pieces

    def _piece(self, lane: int, at: int, most: int) -> tuple[Piece, int]:
        """The piece that begins at the lane's chunk `at`, and its number of chunks, at most `most`."""
        epoch, offset = divmod(at, self.lane_chunks)
        order, ends = self._epoch(epoch)
        lane_start = lane * self.lane_chunks
        place = int(np.searchsorted(ends, lane_start + offset, side="right"))
        document = int(order[place])
        document_start = int(ends[place] - self.chunks[document])
        within = lane_start + offset - document_start
        taken = min(int(self.chunks[document]) - within, self.lane_chunks - offset, most)
        start = within * self.chunk
        length = min(taken * self.chunk, int(self.usable[document]) - start)
        position = min(within, offset) * self.chunk  # since the document's or the lane's start
        return Piece(document, start, length, position), taken

    def _make_epoch(self, epoch: int) -> tuple[Int64, Int64]:
        """Documents in the epoch's order, and the end of each in the list of chunks."""
        order = epoch_order((*self.seed, epoch), self.store.shard_ids, self.shuffle_shards)
        return order, np.cumsum(self.chunks[order])
