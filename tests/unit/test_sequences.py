"""Sequences: which tokens each holds, what is left out, the order of epochs."""

import numpy as np
import pytest
from data_helpers import ArrayStore
from hypothesis import given, settings
from hypothesis import strategies as st

from megamem.data.rows import DocumentSlice
from megamem.data.sequences import SequencePlan, pack
from megamem.errors import DataError

LENGTHS = [4, 9, 10, 25, 1, 0, 3]  # sequences of 8 with their labels need 9, 17, 25, ... tokens


def plan(lengths=LENGTHS, documents="drop", sequence_length=8, chunk_size=4, seed=(0, 0), **options):
    store = lengths if isinstance(lengths, ArrayStore) else ArrayStore(lengths)
    return SequencePlan(
        store,
        sequence_length=sequence_length,
        chunk_size=chunk_size,
        documents=documents,
        seed=seed,
        **options,
    )


def epoch(sequences, number=0):
    return [sequences.slices(number * len(sequences) + i) for i in range(len(sequences))]


def test_drop_keeps_whole_sequences_only():
    sequences = plan()
    assert sorted(epoch(sequences), key=str) == [
        [DocumentSlice(1, 0, 8, 0)],
        [DocumentSlice(2, 0, 8, 0)],
        [DocumentSlice(3, 0, 8, 0)],
        [DocumentSlice(3, 16, 8, 0)],
        [DocumentSlice(3, 8, 8, 0)],
    ]
    report = sequences.report
    assert (report.documents, report.tokens, report.samples) == (7, 52, 5)
    assert report.short_documents == 4  # of 4, 1, 0 and 3 tokens
    assert report.dropped_tokens == 3 + 1 + 2  # of the documents of 4, 10 and 3 tokens
    assert report.padded_positions == 0


def test_pad_adds_a_window_for_every_rest():
    sequences = plan(documents="pad")
    slices = [part for (part,) in epoch(sequences)]
    rests = sorted((p.document, p.start, p.length) for p in slices if p.length < 8)
    assert rests == [(0, 0, 3), (2, 8, 1), (6, 0, 2)]
    assert sequences.report.samples == 8
    assert sequences.report.dropped_tokens == 0
    assert sequences.report.padded_positions == 8 * 8 - (3 + 8 + 8 + 1 + 24 + 2)


def test_pack_fills_sequences_with_remainders():
    sequences = plan(documents="pack")
    shared = sorted(
        [(p.document, p.start, p.length) for p in sequence] for sequence in epoch(sequences) if len(sequence) > 1
    )
    assert shared == [[(0, 0, 3), (2, 8, 1)]]
    assert sequences.report.samples == 7
    assert sequences.report.padded_positions == 7 * 8 - 46


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=20).filter(lambda sizes: max(sizes) > 16),
    documents=st.sampled_from(["drop", "pad", "pack"]),
    chunk_size=st.sampled_from([1, 2, 4, 8, 16]),
    seed=st.integers(0, 3),
)
def test_every_label_is_given_once_an_epoch(lengths, documents, chunk_size, seed):
    """Each position with a label is in exactly one sequence, or counted as dropped; sequences are never overfull."""
    sequences = plan(lengths, documents, 16, chunk_size, (seed, 0))
    seen = []
    for sequence in epoch(sequences, number=1):
        assert sum(-(-part.length // chunk_size) * chunk_size for part in sequence) <= 16
        assert len(sequence) == 1 or documents == "pack"
        for part in sequence:
            assert part.length >= 1
            assert part.start + part.length + 1 <= lengths[part.document]
            seen += [(part.document, part.start + i) for i in range(part.length)]
    assert len(seen) == len(set(seen))
    labels = sum(max(length - 1, 0) for length in lengths)
    assert len(seen) == labels - sequences.report.dropped_tokens
    if documents != "drop":
        assert sequences.report.dropped_tokens == 0
    assert sequences.report.padded_positions == 16 * len(sequences) - len(seen)


@settings(max_examples=150, deadline=None)
@given(sizes=st.lists(st.integers(1, 7), max_size=60), extra=st.integers(0, 9))
def test_packing_uses_every_item_once_and_never_overfills(sizes, extra):
    capacity = 7 + extra
    order, counts = pack(np.array(sizes, np.int64), capacity)
    assert sorted(order.tolist()) == list(range(len(sizes)))
    ends = np.cumsum(counts)
    loads = [sum(sizes[i] for i in items) for items in np.split(order, ends)[:-1]]
    assert all(0 < load <= capacity for load in loads)
    assert sum(loads) == sum(sizes)
    assert sum(load <= capacity / 2 for load in loads) <= 1  # two half-empty bins would have been joined


def test_packing_is_fast_for_many_items():
    sizes = np.random.default_rng(0).integers(1, 17, 1_000_000)
    order, counts = pack(sizes, 16)
    assert len(order) == 1_000_000
    assert len(counts) <= 1.01 * sizes.sum() / 16


def test_epochs_are_different_orders_of_the_same_sequences():
    sequences = plan([200, 300, 90])
    first, second = epoch(sequences, 0), epoch(sequences, 1)
    assert first != second
    assert sorted(map(str, first)) == sorted(map(str, second))
    assert epoch(plan([200, 300, 90]), 0) == first
    assert epoch(plan([200, 300, 90], seed=(1, 0)), 0) != first


def test_any_sample_is_found_without_the_earlier_ones():
    reference = epoch(plan([200, 300, 90]), 7)
    sequences = plan([200, 300, 90])
    for i in (20, 3, 55):
        assert sequences.slices(7 * len(sequences) + i) == reference[i]


def test_shuffling_within_groups_of_shards_keeps_shards_together():
    shard_ids = np.repeat(np.arange(10), 20)
    store = ArrayStore([17] * 200, shard_ids)
    sequences = plan(store, shuffle_shards=2)
    for number in (0, 1):
        shards = [shard_ids[sequence[0].document] for sequence in epoch(sequences, number)]
        groups = [set(shards[i : i + 80]) for i in range(0, 400, 80)]
        assert all(len(group) == 2 for group in groups)
        assert set().union(*groups) == set(range(10))
        assert len(set(shards[:20])) == 2  # mixed within the group, not one shard after the other
    assert epoch(sequences, 0) != epoch(sequences, 1)


def test_no_document_is_long_enough():
    with pytest.raises(
        DataError,
        match=r"array: no document is long enough: all 7 are shorter than a sequence of 32 tokens .*longest: 25",
    ):
        plan(sequence_length=32)
    assert len(plan(sequence_length=32, documents="pad")) == 5
    with pytest.raises(DataError, match="none of its 2 documents has two tokens"):
        plan([1, 0], documents="pack")
