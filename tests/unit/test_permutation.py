"""Orders computed place by place: permutations with their inverse, different for every seed, and random enough."""

import numpy as np
import pytest

from megamem.data.permutation import Permutation


@pytest.mark.parametrize("size", [*range(1, 40), 255, 256, 257, 1000, 99_991])
def test_every_item_has_one_place(size):
    for seed in range(3):
        order = Permutation(size, (seed, 5))
        everything = np.arange(size)
        items = order(everything)
        assert items.dtype == np.int64
        np.testing.assert_array_equal(np.sort(items), everything)
        np.testing.assert_array_equal(order.places(items), everything)


def test_places_are_computed_one_by_one():
    order = Permutation(1_000_000_007, (1,))
    places = np.random.default_rng(0).integers(0, order.size, 1000)
    items = order(places)
    assert items.min() >= 0
    assert items.max() < order.size
    np.testing.assert_array_equal(items[::-1], order(places[::-1]))
    np.testing.assert_array_equal(order.places(items), places)


def test_seeds_give_different_orders():
    orders = {tuple(Permutation(1000, seed)(np.arange(1000))) for seed in [(0,), (1,), (0, 0), (0, 1), (0, 0, 1)]}
    # numpy's seeds (0,) and (0, 0) are one
    assert len(orders) == 4


def test_items_are_spread_evenly_over_places():
    """Chi-square over 20,000 orders of 20: 361 degrees of freedom, so 361 +- 27; 5 standard deviations are allowed."""
    counts, orders = np.zeros((20, 20)), 20_000
    for seed in range(orders):
        counts[np.arange(20), Permutation(20, (seed,))(np.arange(20))] += 1
    expected = orders / 20
    assert ((counts - expected) ** 2 / expected).sum() < 361 + 5 * 27


def test_neighbours_are_torn_apart():
    """In a random order of n items one pair of neighbours stays together on average, in either direction."""
    together = [int((np.diff(Permutation(10_000, (seed,))(np.arange(10_000))) == 1).sum()) for seed in range(200)]
    assert 0.5 < np.mean(together) < 1.6
