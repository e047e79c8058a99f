"""A corpus of 200,000 web-like documents and one of long books, joined: no padding, every token once, any layout.

Lengths are log-normal as on the web, scaled from a mean of 1,000 tokens down to 25 so that an epoch is read in seconds;
sequences of 128 tokens and chunks of 32 hold as many documents as 5,120 and 1,280 do at full length. Token i of
document d is d * 2**20 + i, so that every token tells where it is from.
"""

import numpy as np
import pytest

from megamem.config.data import DataConfig
from megamem.data.global_rows import LaneRows, SequenceRows
from megamem.data.rows import Row
from tests.unit.data_helpers import ArrayStore

DOCUMENTS, CHUNK, LENGTH, ROWS = 200_000, 32, 128, 64
PLACE = 1 << 20


class CodedStore(ArrayStore):
    """Tokens that say where they are from."""

    def tokens(self, document, start, stop):
        return np.arange(PLACE * document + start, PLACE * document + stop)


def web_lengths():
    drawn = np.random.default_rng(0).lognormal(np.log(25) - 0.5, 1.0, DOCUMENTS)
    return np.maximum(drawn, 2).astype(np.int64)


def rows_of(lengths, kind=SequenceRows, **changes):
    feeding = "streams" if kind is LaneRows else "sequences"
    config = DataConfig(sources="none", feeding=feeding, sequence_length=LENGTH, **{"reset": "exact"} | changes)
    store = CodedStore(lengths, np.arange(len(lengths)) * 50 // len(lengths))
    return kind(config, [store], CHUNK, ROWS)


def read(rows, steps, numbers=range(ROWS)):
    """(tokens, labels, begins, starts) of whole steps, or of some rows of each, row after row."""
    parts = []
    for step in steps:
        for number in numbers:
            row = Row.empty(LENGTH, CHUNK, begins=True)
            rows.fill(step, number, row)
            parts.append((row.tokens, row.labels, row.begins, row.starts))
    return [np.stack(arrays) for arrays in zip(*parts, strict=True)]


@pytest.fixture(scope="module")
def lengths():
    return web_lengths()


@pytest.fixture(scope="module")
def epoch(lengths):
    """A whole epoch of sequences."""
    rows = rows_of(lengths)
    (report,) = rows.reports
    tokens, labels, begins, starts = read(rows, range(-(-report.samples // ROWS)))
    here = slice(0, report.samples)
    return report, tokens[here], labels[here], begins[here], starts[here]


def test_nothing_is_padded_and_every_token_is_predicted_once(lengths, epoch):
    """All tokens but the first of the epoch and the fewer than a sequence at its end."""
    report, tokens, labels, _, _ = epoch
    total = int(lengths.sum())
    assert report.samples == (total - 1) // LENGTH
    assert report.predicted_tokens == labels.size == total - 1 - report.dropped_tokens
    assert (report.padded_positions, report.padding_share) == (0, 0.0)
    assert report.dropped_tokens < LENGTH
    assert len(np.unique(labels)) == labels.size
    documents, places = labels // PLACE, labels % PLACE
    assert (places < lengths[documents]).all()
    np.testing.assert_array_equal(tokens[:, 1:], labels[:, :-1])


def test_documents_are_whole_and_shuffled(lengths, epoch):
    _, tokens, labels, _, _ = epoch
    follows = labels == tokens + 1
    ends = tokens % PLACE == lengths[tokens // PLACE] - 1
    begins = labels % PLACE == 0
    # within a document its next token follows, after its last one a document begins
    np.testing.assert_array_equal(follows, ~ends)
    np.testing.assert_array_equal(begins, ends)
    neighbours = labels[ends] // PLACE - tokens[ends] // PLACE
    assert (np.abs(neighbours) == 1).sum() < 20  # of 200,000 pairs in random order: 2


def test_resets_are_the_borders(epoch):
    _, tokens, _, begins, starts = epoch
    position = np.minimum(tokens % PLACE, np.arange(LENGTH))
    np.testing.assert_array_equal(begins, position == 0)
    np.testing.assert_array_equal(starts, position[:, ::CHUNK])


@pytest.mark.parametrize("kind", [SequenceRows, LaneRows])
@pytest.mark.parametrize("shuffle_shards", [0, 3])
def test_ranks_and_resumed_runs_read_the_same(lengths, kind, shuffle_shards):
    """2 and 4 data-parallel ranks, each fresh and from the middle of an epoch on, bit for bit."""
    steps = range(300, 304)
    whole = read(rows_of(lengths, kind, shuffle_shards=shuffle_shards), steps)
    for ranks in (2, 4):
        share = ROWS // ranks
        for rank in range(ranks):
            numbers = range(rank * share, (rank + 1) * share)
            mine = read(rows_of(lengths, kind, shuffle_shards=shuffle_shards), steps, numbers)
            for part, everything in zip(mine, whole, strict=True):
                expected = everything.reshape(len(steps), ROWS, -1)[:, numbers].reshape(part.shape)
                np.testing.assert_array_equal(part, expected)


def test_lanes_read_the_epoch_once(lengths):
    rows = rows_of(lengths, LaneRows)
    (report,) = rows.reports
    steps = report.predicted_tokens // ROWS // LENGTH
    tokens, labels, begins, starts = read(rows, range(steps))
    assert len(np.unique(labels)) == labels.size
    lanes = tokens.reshape(steps, ROWS, LENGTH).swapaxes(0, 1).reshape(ROWS, -1)
    following = labels.reshape(steps, ROWS, LENGTH).swapaxes(0, 1).reshape(ROWS, -1)
    np.testing.assert_array_equal(lanes[:, 1:], following[:, :-1])
    position = np.minimum(lanes % PLACE, np.arange(lanes.shape[1]))
    by_step = position.reshape(ROWS, steps, LENGTH).swapaxes(0, 1).reshape(-1, LENGTH)
    np.testing.assert_array_equal(begins, by_step == 0)
    np.testing.assert_array_equal(starts, by_step[:, ::CHUNK])


def test_books_are_spread_over_the_epoch():
    """14 documents as long as books: sequences of one book do not fill a batch."""
    lengths = np.random.default_rng(1).integers(5_000, 40_000, 14)
    rows = rows_of(lengths, reset="none")
    (report,) = rows.reports
    assert report.padding_share == 0
    tokens, labels, _, starts = read(rows, range(report.samples // ROWS))
    assert len(np.unique(labels)) == labels.size
    np.testing.assert_array_equal(starts, np.tile(np.arange(0, LENGTH, CHUNK), (len(starts), 1)))
    books = (tokens[:, 0] // PLACE).reshape(-1, ROWS)
    assert min(len(set(batch.tolist())) for batch in books) >= 8
