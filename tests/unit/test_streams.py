"""Streams: lanes read every chunk of an epoch once, in order, with resets where memory must start anew."""

import numpy as np
import pytest
from data_helpers import ArrayStore
from hypothesis import given, settings
from hypothesis import strategies as st

from megamem.data.streams import StreamPlan
from megamem.errors import DataError

CHUNK = 4


def plan(lengths, lanes=3, chunks_per_step=2, seed=(0, 0), **options):
    return StreamPlan(
        ArrayStore(lengths), chunk_size=CHUNK, chunks_per_step=chunks_per_step, lanes=lanes, seed=seed, **options
    )


def chunks_read(streams, lane, steps):
    """(document, first token, length, position) of every chunk a lane reads in `steps` steps."""
    chunks = []
    for step in range(steps):
        slices = streams.slices(lane, step)
        for part in slices:
            for at in range(0, part.length, CHUNK):
                length = min(CHUNK, part.length - at)
                chunks.append((part.document, part.start + at, length, part.position + at))
    return chunks


def test_one_lane_reads_whole_documents_one_after_the_other():
    streams = plan([9, 14, 6], lanes=1, chunks_per_step=1)
    order = streams._epoch(0)[0].tolist()
    expected = []
    for document in order:
        usable = [9, 14, 6][document] - 1
        expected += [(document, at, min(CHUNK, usable - at), at) for at in range(0, usable, CHUNK)]
    assert chunks_read(streams, 0, len(expected)) == expected
    assert len(expected) == 2 + 4 + 2


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=12),
    lanes=st.integers(1, 5),
    chunks_per_step=st.integers(1, 7),
    seed=st.integers(0, 3),
)
def test_lanes_read_every_chunk_once_an_epoch(lengths, lanes, chunks_per_step, seed):
    usable = [max(length - 1, 0) for length in lengths]
    everything = {(d, at) for d, n in enumerate(usable) for at in range(0, n, CHUNK)}
    if len(everything) < lanes:
        with pytest.raises(DataError, match=f"{len(everything)} chunks of 4 tokens in .* do not fill {lanes} lanes"):
            plan(lengths, lanes, chunks_per_step, (seed, 0))
        return
    streams = plan(lengths, lanes, chunks_per_step, (seed, 0))
    per_lane = len(everything) // lanes
    epochs = 3
    read = []
    for lane in range(lanes):
        chunks = chunks_read(streams, lane, -(-per_lane * epochs // chunks_per_step))
        assert len(chunks) >= per_lane * epochs
        read.append(chunks)
        check_positions(chunks, per_lane)
    for epoch in range(epochs):
        seen = [c[:2] for chunks in read for c in chunks[epoch * per_lane : (epoch + 1) * per_lane]]
        assert len(set(seen)) == len(seen) == per_lane * lanes
        assert set(seen) <= everything
        assert len(everything) - len(seen) < lanes
    assert streams.report.predicted_tokens == sum(length for chunks in read for *_, length, _ in chunks[:per_lane])
    for document, at, length, _ in read[0]:
        assert length == min(CHUNK, usable[document] - at)


def check_positions(chunks, per_lane):
    """Positions start at 0 with each document and each of the lane's parts, and count on within them."""
    for i, (document, at, _, position) in enumerate(chunks):
        if i % per_lane == 0 or at == 0:
            assert position == 0
        else:
            assert (document, at - CHUNK) == chunks[i - 1][:2]
            assert position == chunks[i - 1][3] + CHUNK


def test_a_lane_that_starts_in_mid_document_starts_at_position_0():
    streams = plan([41], lanes=2, chunks_per_step=1)  # ten chunks, five a lane
    assert chunks_read(streams, 1, 6) == [
        (0, 20, 4, 0),
        (0, 24, 4, 4),
        (0, 28, 4, 8),
        (0, 32, 4, 12),
        (0, 36, 4, 16),
        (0, 20, 4, 0),
    ]


def test_a_step_is_the_same_whatever_was_read_before():
    lengths = [30, 7, 81, 2, 55]
    reference = plan(lengths)
    expected = [reference.slices(1, step) for step in range(40)]
    streams = plan(lengths)
    for step in (39, 0, 17, 18, 3):
        assert streams.slices(1, step) == expected[step]
    assert [plan(lengths, seed=(1, 0)).slices(1, step) for step in range(40)] != expected


def test_epochs_shuffle_documents_within_groups_of_shards():
    shard_ids = np.repeat(np.arange(8), 5)
    store = ArrayStore([9] * 40, shard_ids)
    streams = StreamPlan(store, chunk_size=4, chunks_per_step=1, lanes=1, seed=(0, 0), shuffle_shards=2)
    shards = [shard_ids[document] for document in streams._epoch(0)[0]]
    assert [len(set(shards[i : i + 10])) for i in range(0, 40, 10)] == [2, 2, 2, 2]
    assert streams._epoch(0)[0].tolist() != streams._epoch(1)[0].tolist()


def test_report():
    report = plan([9, 14, 6, 1], lanes=3).report  # 2 + 4 + 2 chunks, 2 for each lane
    assert (report.documents, report.tokens, report.short_documents) == (4, 30, 1)
    assert report.samples == 3
    read = sum(length for lane in range(3) for _, _, length, _ in chunks_read(plan([9, 14, 6, 1], lanes=3), lane, 1))
    assert report.predicted_tokens == read
    assert report.dropped_tokens == 8 + 13 + 5 - read
    assert report.padded_positions == 6 * CHUNK - read
    assert report.padding_share == 1 - read / (6 * CHUNK)
