"""Mixtures of sources and shuffles."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megamem.data.order import CYCLE, Mixture, epoch_order, quotas
from megamem.errors import ConfigError

WEIGHTS = st.lists(st.floats(0.1, 10), min_size=1, max_size=6)


@settings(max_examples=100, deadline=None)
@given(weights=WEIGHTS, total=st.integers(1, 5000))
def test_quotas_are_proportional(weights, total):
    counts = quotas(weights, total)
    shares = np.array(weights) / sum(weights) * total
    assert counts.sum() == total
    assert (np.abs(counts - shares) < 1 + 1e-9).all()


@pytest.mark.parametrize(
    ("weights", "total", "counts"),
    [
        ([6.1, 2.9], 9, [6, 3]),  # what is left over goes to the largest remainder, not to the largest share
        ([1, 1, 1], 5, [2, 2, 1]),  # equal ones: the first
        ([61, 29, 10], 10, [6, 3, 1]),
        ([5, 0.1], 3, [3, 0]),
    ],
)
def test_what_is_left_over_goes_to_the_largest_remainders(weights, total, counts):
    assert quotas(weights, total).tolist() == counts


@settings(max_examples=30, deadline=None)
@given(weights=WEIGHTS, seed=st.integers(0, 5), cycle=st.integers(0, 10**9))
def test_every_block_holds_each_share_and_every_sample_comes_once(weights, seed, cycle):
    mixture = Mixture(weights, seed)
    located = [mixture.locate(sample) for sample in range(cycle * CYCLE, (cycle + 1) * CYCLE)]
    for source, quota in enumerate(mixture.quotas):
        indices = [index for s, index in located if s == source]
        assert indices == list(range(cycle * quota, (cycle + 1) * quota))  # in order, without gaps over blocks


def test_two_to_one():
    mixture = Mixture([2, 1], 0)
    sources = [mixture.locate(sample)[0] for sample in range(3 * CYCLE)]
    assert sources.count(0) == 3 * 683
    assert sources.count(1) == 3 * 341
    assert sources[:CYCLE] != sources[CYCLE : 2 * CYCLE]
    assert [Mixture([4, 2], 0).locate(i)[0] for i in range(3 * CYCLE)] == sources
    assert [Mixture([2, 1], 1).locate(i)[0] for i in range(3 * CYCLE)] != sources


def test_one_source_is_read_in_its_own_order():
    assert [Mixture([0.3], 0).locate(i) for i in (0, 5, 10**12)] == [(0, 0), (0, 5), (0, 10**12)]


def test_a_weight_too_small_for_a_block_is_refused():
    with pytest.raises(ConfigError) as refused:
        Mixture([3.0, 0.001, 1.0], 0)
    assert str(refused.value) == (
        "data.sources[1].weight: its share of the samples is 2.50e-04; at least 1/1024 is needed"
    )


def test_orders_are_numpy_s_and_stay_so():
    """A run is resumed by counting: its order must be the same with the next version."""
    files = np.repeat(np.arange(3), 2)
    assert epoch_order((3, 0, 1), files, 0).tolist() == np.random.default_rng((3, 0, 1)).permutation(6).tolist()
    assert epoch_order((3, 0, 1), files, 0).tolist() != epoch_order((3, 0, 2), files, 0).tolist()
    generator = np.random.default_rng((3, 0, 1))
    place, key = generator.permutation(3), generator.permutation(6)
    expected = sorted(range(6), key=lambda item: (place[files[item]] // 2, key[item]))
    assert epoch_order((3, 0, 1), files, 2).tolist() == expected
    sources = np.random.default_rng((5, 1)).permutation([0] * 683 + [1] * 341)  # of the second cycle
    assert [Mixture([2, 1], 5).locate(CYCLE + i)[0] for i in range(CYCLE)] == sources.tolist()


@settings(max_examples=50, deadline=None)
@given(shards=st.lists(st.integers(1, 9), min_size=1, max_size=12), group=st.integers(0, 14), seed=st.integers(0, 99))
def test_epoch_order_is_a_permutation_in_groups(shards, group, seed):
    shard_ids = np.repeat(np.arange(len(shards)), shards)
    order = epoch_order((seed, 0, 0), shard_ids, group)
    assert sorted(order.tolist()) == list(range(len(shard_ids)))
    np.testing.assert_array_equal(order, epoch_order((seed, 0, 0), shard_ids, group))
    if group:
        files = list(dict.fromkeys(shard_ids[order].tolist()))  # by first appearance
        sizes = [sum(shards[shard] for shard in files[i : i + group]) for i in range(0, len(files), group)]
        borders = np.cumsum(sizes)
        assert borders[-1] == len(order)
        for start, end in zip([0, *borders], borders, strict=False):
            assert len(set(shard_ids[order[start:end]].tolist())) <= group
