"""Joined documents: every token once an epoch, in an order that is a function of seed and place, and exact resets."""

import numpy as np
import pytest
from data_helpers import ArrayStore
from hypothesis import given, settings
from hypothesis import strategies as st

from megamem.data.joined import BLOCKS, PLACES, JoinedText
from megamem.data.joined_rows import JoinedSequences, JoinedStreams
from megamem.data.rows import Row
from megamem.errors import DataError

CHUNK, LENGTH = 4, 12
PLACE = 1 << 20


class CodedStore(ArrayStore):
    """Documents whose tokens say where they are from: token i of document d is d * 2**20 + i."""

    def tokens(self, document, start, stop):
        assert 0 <= start < stop <= self.lengths[document]
        return PLACE * document + np.arange(start, stop, dtype=np.int64)


def row_of(length=LENGTH, begins=True):
    return Row.empty(length, CHUNK, begins=begins)


def whole(text, epoch):
    return text.read(epoch, 0, text.tokens)


def documents_in_order(text, epoch):
    return [code // PLACE for code in whole(text, epoch).tokens.tolist() if code % PLACE == 0]


some_lengths = st.lists(st.integers(0, 40), min_size=1, max_size=150).filter(lambda lengths: sum(lengths) > LENGTH)


@settings(max_examples=80, deadline=None)
@given(lengths=some_lengths, shards=st.integers(1, 5), group=st.integers(0, 3), data=st.data())
def test_text_is_all_documents_one_after_the_other(lengths, shards, group, data):
    shard_ids = np.sort(np.arange(len(lengths)) % shards)
    text = JoinedText(CodedStore(lengths, shard_ids), (3, 0), group)
    tokens = whole(text, 1).tokens
    order = documents_in_order(text, 1)
    assert sorted(order) == [d for d, length in enumerate(lengths) if length]
    expected = np.concatenate([PLACE * d + np.arange(lengths[d]) for d in order])
    np.testing.assert_array_equal(tokens, expected)
    start = data.draw(st.integers(0, len(tokens) - 1))
    stop = data.draw(st.integers(start + 1, len(tokens)))
    part = text.read(1, start, stop)
    np.testing.assert_array_equal(part.tokens, tokens[start:stop])
    np.testing.assert_array_equal(part.begins, np.flatnonzero(tokens[start:stop] % PLACE == 0))
    assert part.position == tokens[start] % PLACE


def test_epochs_and_seeds_have_different_orders():
    orders = {
        tuple(documents_in_order(JoinedText(CodedStore([3] * 300), seed), epoch))
        for seed in ((0, 0), (1, 0), (0, 1))
        for epoch in (0, 1)
    }
    assert len(orders) == 6


def test_groups_of_shards_follow_one_another():
    shard_ids = np.repeat(np.arange(10), 20)
    text = JoinedText(CodedStore([5] * 200, shard_ids), (0, 0), 2)
    found = []
    for epoch in (0, 1):
        shards = shard_ids[documents_in_order(text, epoch)]
        groups = [set(shards[i : i + 40].tolist()) for i in range(0, 200, 40)]
        assert all(len(group) == 2 for group in groups)
        assert set().union(*groups) == set(range(10))
        assert len(set(shards[:20].tolist())) == 2
        found.append(shards.tolist())
    assert found[0] != found[1]


def test_what_is_remembered_of_an_epoch_is_bounded_however_many_groups_it_has():
    """Blocks are kept for all groups together: an epoch of 100 million documents has hundreds of groups."""
    shards, blocks = 8, BLOCKS // 4
    text = JoinedText(
        CodedStore([1] * (shards * blocks * PLACES), np.repeat(np.arange(shards), blocks * PLACES)), (0, 0), 1
    )
    for start in range(0, text.tokens, PLACES):
        text.read(0, start, start + 1)
    groups = [text.epoch(0).group(number) for number in range(shards)]
    assert len({id(group) for group in groups}) == shards
    assert text.block.cache_info().currsize == BLOCKS < shards * blocks
    kept = [value for group in groups for value in vars(group).values() if isinstance(value, np.ndarray)]
    assert sum(value.nbytes for value in kept if value is not text.store.lengths) < 200 * shards * blocks


@settings(max_examples=60, deadline=None)
@given(lengths=some_lengths, shards=st.integers(1, 5), group=st.integers(0, 3), exact=st.booleans())
def test_sequences_predict_every_token_once(lengths, shards, group, exact):
    store = CodedStore(lengths, np.sort(np.arange(len(lengths)) % shards))
    sequences = JoinedSequences(
        store, sequence_length=LENGTH, chunk_size=CHUNK, reset=exact, seed=(0, 0), shuffle_shards=group
    )
    epoch, predicted = 2, []
    text = whole(sequences.text, epoch).tokens
    for index in range(len(sequences)):
        row = row_of(begins=exact)
        sequences.fill(epoch * len(sequences) + index, row)
        np.testing.assert_array_equal(row.tokens[1:], row.labels[:-1])
        predicted += row.labels.tolist()
        assert_resets(row, exact, np.arange(LENGTH))
    assert len(sequences) == (sum(lengths) - 1) // LENGTH
    assert sorted(predicted) == sorted(text[1 : len(sequences) * LENGTH + 1].tolist())
    report = sequences.report
    assert (report.samples, report.predicted_tokens, report.padded_positions) == (len(sequences), len(predicted), 0)
    assert report.dropped_tokens == sum(lengths) - 1 - len(predicted) < LENGTH
    assert report.padding_share == 0


def assert_resets(row, exact, since):
    """since: [tokens] tokens since the row's text began with a fresh memory."""
    if not exact:
        np.testing.assert_array_equal(row.starts, since[::CHUNK])
        assert row.begins is None
        return
    position = np.minimum(row.tokens % PLACE, since)
    np.testing.assert_array_equal(row.begins, position == 0)
    np.testing.assert_array_equal(row.starts, position[::CHUNK])


@settings(max_examples=60, deadline=None)
@given(
    lengths=some_lengths,
    lanes=st.integers(1, 4),
    shards=st.integers(1, 5),
    group=st.integers(0, 3),
    exact=st.booleans(),
)
def test_lanes_read_on_without_a_gap(lengths, lanes, shards, group, exact):
    store = CodedStore(lengths, np.sort(np.arange(len(lengths)) % shards))
    options = {"sequence_length": LENGTH, "chunk_size": CHUNK, "lanes": lanes, "reset": exact, "seed": (0, 0)}
    part = (sum(lengths) - 1) // (lanes * CHUNK) * CHUNK
    if part == 0:
        with pytest.raises(DataError, match=rf"its {sum(lengths)} tokens do not fill {lanes} lanes with chunks of 4"):
            JoinedStreams(store, **options, shuffle_shards=group)
        return
    streams = JoinedStreams(store, **options, shuffle_shards=group)
    steps = -(-3 * part // LENGTH)
    for lane in range(lanes):
        rows = [row_of(begins=exact) for _ in range(steps)]
        for step, row in enumerate(rows):
            streams.fill(lane, step, row)
            assert_resets(row, exact, np.arange(step * LENGTH, (step + 1) * LENGTH) % part)
        read, labels = (np.concatenate([getattr(row, name) for row in rows]) for name in ("tokens", "labels"))
        for epoch in range(3):
            text = whole(streams.text, epoch).tokens
            here = slice(epoch * part, (epoch + 1) * part)
            np.testing.assert_array_equal(read[here], text[lane * part : (lane + 1) * part])
            np.testing.assert_array_equal(labels[here], text[lane * part + 1 : (lane + 1) * part + 1])
    assert streams.report.predicted_tokens == lanes * part
    assert streams.report.dropped_tokens == sum(lengths) - 1 - lanes * part < lanes * CHUNK


def test_sequences_of_a_long_document_do_not_follow_each_other():
    sequences = JoinedSequences(
        CodedStore([50_000, 50_000]), sequence_length=100, chunk_size=CHUNK, reset=False, seed=(0, 0)
    )
    order = [sequences.sequence(0, index) for index in range(len(sequences))]
    assert sorted(order) == list(range(999))
    assert int((np.diff(order) == 1).sum()) < 10  # of a random order: one


def test_too_little_text():
    with pytest.raises(DataError, match="array: its 12 tokens do not fill one sequence of 12 tokens and the one that"):
        JoinedSequences(CodedStore([5, 7]), sequence_length=12, chunk_size=4, reset=False, seed=(0, 0))
