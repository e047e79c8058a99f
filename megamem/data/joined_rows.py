"""Rows of joined text: sequences cut wherever they end, and lanes that read on without a gap."""

from functools import lru_cache

import numpy as np

from megamem.data.joined import JoinedText
from megamem.data.permutation import Permutation
from megamem.data.rows import Row, SourceReport
from megamem.data.store import DocumentStore, Int64
from megamem.errors import DataError

NEIGHBOURS = 256
"""Sequences whose places in the order are computed together."""


class JoinedSequences:
    """The sequences of a source whose documents are joined.

    Sequence i of an epoch reads tokens i * L to (i + 1) * L - 1 of its text and predicts each one's successor, so that
    every token of the epoch is predicted once but the first, and the fewer than L at the end that fill no sequence. The
    sequences are shuffled once more, within their groups of shards: those of a long document do not follow each other.
    """

    def __init__(
        self,
        store: DocumentStore,
        *,
        sequence_length: int,
        chunk_size: int,
        reset: bool,
        seed: tuple[int, int],
        shuffle_shards: int = 0,
    ) -> None:
        """Cut a source into sequences.

        Args:
            store: the source.
            sequence_length: tokens of a sequence, a multiple of `chunk_size`.
            chunk_size: tokens of a chunk.
            reset: whether documents that begin inside a sequence start with a fresh memory.
            seed: the configuration's seed and the source's number.
            shuffle_shards: shards shuffled together; 0 shuffles the whole source.

        Raises:
            DataError: the source does not fill a sequence.
        """
        self.text = JoinedText(store, seed, shuffle_shards)
        self.length = sequence_length
        self.chunk_size = chunk_size
        self.reset = reset
        if len(self) == 0:
            raise DataError(
                f"{store.path}: its {self.text.tokens} tokens do not fill one sequence of {sequence_length} tokens and "
                "the one that follows; shorten data.sequence_length"
            )
        self.report = _report(store, self.text, samples=len(self), predicted=len(self) * sequence_length)
        self._group_ends = lru_cache(2)(self._make_group_ends)
        self._order = lru_cache(4)(self._make_order)
        self._neighbours = lru_cache(8)(self._make_neighbours)

    def __len__(self) -> int:
        """Return the number of sequences per epoch."""
        return max(self.text.tokens - 1, 0) // self.length

    def fill(self, sample: int, row: Row) -> None:
        """Read the source's `sample`-th sequence, counted over all epochs, into `row`."""
        epoch, index = divmod(sample, len(self))
        start = self.sequence(epoch, index) * self.length
        _fill(self.text, epoch, start, row, self.chunk_size, position=0, reset=self.reset)

    def sequence(self, epoch: int, index: int) -> int:
        """Return which sequence of an epoch's text is read as the epoch's `index`-th."""
        ends = self._group_ends(epoch)
        group = int(np.searchsorted(ends, index, side="right"))
        first = int(ends[group - 1]) if group else 0
        block, place = divmod(index - first, NEIGHBOURS)
        return first + int(self._neighbours(epoch, group, int(ends[group]) - first, block)[place])

    def _make_group_ends(self, epoch: int) -> Int64:
        """Return the sequence after the last one of each group of shards, [groups]."""
        # a sequence belongs to the group that holds its first token
        return np.minimum(-(-self.text.epoch(epoch).ends // self.length), len(self))

    def _make_order(self, epoch: int, group: int, sequences: int) -> Permutation:
        """Make the order of a group's sequences. The 1 tells its seed from that of the order of documents."""
        return Permutation(sequences, (*self.text.seed, epoch, group, 1))

    def _make_neighbours(self, epoch: int, group: int, sequences: int, block: int) -> Int64:
        """Return the sequences of a group at the places of a block, counted from the group's first."""
        places = np.arange(block * NEIGHBOURS, min((block + 1) * NEIGHBOURS, sequences))
        return self._order(epoch, group, sequences)(places)


class JoinedStreams:
    """The text that each lane reads at each step, of a source whose documents are joined.

    The text of an epoch is cut into `lanes` equal parts of whole chunks; less than a chunk for each lane is left out at
    the end. A lane that reaches the end of its part goes on with its part of the next epoch, with a fresh memory.
    """

    def __init__(
        self,
        store: DocumentStore,
        *,
        sequence_length: int,
        chunk_size: int,
        lanes: int,
        reset: bool,
        seed: tuple[int, int],
        shuffle_shards: int = 0,
    ) -> None:
        """Deal a source out to lanes.

        Args:
            store: the source.
            sequence_length: tokens that a lane reads in an optimizer step, a multiple of `chunk_size`.
            chunk_size: tokens of a chunk.
            lanes: lanes of this source.
            reset: whether documents that begin inside a lane start with a fresh memory.
            seed: the configuration's seed and the source's number.
            shuffle_shards: shards shuffled together; 0 shuffles the whole source.

        Raises:
            DataError: the source has fewer chunks than lanes.
        """
        self.text = JoinedText(store, seed, shuffle_shards)
        self.length = sequence_length
        self.chunk_size = chunk_size
        self.reset = reset
        self.lane_tokens = max(self.text.tokens - 1, 0) // (lanes * chunk_size) * chunk_size
        """Tokens of a lane's part of an epoch."""
        if self.lane_tokens == 0:
            raise DataError(
                f"{store.path}: its {self.text.tokens} tokens do not fill {lanes} lanes with chunks of {chunk_size}; "
                "use fewer rows or a smaller chunk"
            )
        predicted = lanes * self.lane_tokens
        self.report = _report(store, self.text, samples=predicted // sequence_length, predicted=predicted)

    def fill(self, lane: int, step: int, row: Row) -> None:
        """Read what `lane` reads at `step` into `row`."""
        at = 0
        while at < self.length:
            epoch, offset = divmod(step * self.length + at, self.lane_tokens)
            until = min(at + self.lane_tokens - offset, self.length)
            part = row.part(at, until, self.chunk_size)
            _fill(self.text, epoch, lane * self.lane_tokens + offset, part, self.chunk_size, offset, self.reset)
            at = until


def _report(store: DocumentStore, text: JoinedText, *, samples: int, predicted: int) -> SourceReport:
    """Describe a joined source: nothing is padded, and no document is too short."""
    return SourceReport(
        path=store.path,
        documents=len(store),
        tokens=text.tokens,
        samples=samples,
        short_documents=0,
        dropped_tokens=text.tokens - 1 - predicted,
        predicted_tokens=predicted,
        padded_positions=0,
    )


def _fill(text: JoinedText, epoch: int, start: int, row: Row, chunk_size: int, position: int, reset: bool) -> None:
    """Read a row of an epoch's text from token `start` on.

    Args:
        text: the text.
        epoch: the epoch.
        start: the first token that is read.
        row: overwritten.
        chunk_size: tokens of a chunk.
        position: tokens since the sequence or the lane's part began, with a fresh memory.
        reset: whether documents that begin inside the row start with a fresh memory.
    """
    length = len(row.tokens)
    stretch = text.read(epoch, start, start + length + 1)
    row.tokens[:] = stretch.tokens[:-1]
    row.labels[:] = stretch.tokens[1:]
    chunks = np.arange(0, length, chunk_size)
    if not reset:
        row.starts[:] = position + chunks
        return
    # the memory was reset where the first document or the row's text began, whichever came later
    begins = np.append(-min(stretch.position, position), stretch.begins[stretch.begins < length])
    row.starts[:] = chunks - begins[np.searchsorted(begins, chunks, side="right") - 1]
    assert row.begins is not None
    row.begins[:] = False
    row.begins[begins[begins >= 0]] = True
