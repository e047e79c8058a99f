"""Shuffles of an epoch and mixtures of sources, as pure functions of the seed and an index."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from megamem.data.store import Int64
from megamem.errors import ConfigError

CYCLE = 1024
"""Samples in a cycle of a mixture: every cycle holds the same number of each source's samples."""


def epoch_order(seed: Sequence[int], shard_ids: Int64, shuffle_shards: int) -> Int64:
    """Return a permutation [items] of items that lie in files; equal for equal seeds.

    Args:
        seed: the numbers the order is drawn from.
        shard_ids: [items] file of each item.
        shuffle_shards: files are put into random groups of that many, groups follow one another, and items are shuffled
            within a group; 0 shuffles all items at once.
    """
    generator = np.random.default_rng(tuple(seed))
    if not shuffle_shards:
        return generator.permutation(len(shard_ids))
    group_of = generator.permutation(int(shard_ids.max()) + 1) // shuffle_shards
    return np.lexsort((generator.permutation(len(shard_ids)), group_of[shard_ids]))


def quotas(weights: Sequence[float], total: int) -> Int64:
    """Return [sources] integers that sum to `total` in proportion to `weights`, by the largest-remainder method."""
    shares = np.asarray(weights, dtype=np.float64) / sum(weights) * total
    counts = np.floor(shares).astype(np.int64)
    by_remainder = np.argsort(-(shares - counts), kind="stable")
    counts[by_remainder[: total - int(counts.sum())]] += 1
    return counts


class Mixture:
    """Which source a sample comes from, and which of the source's samples it is.

    Every cycle of 1,024 samples holds each source's share exactly, rounded to 1/1024, in an order drawn from
    (seed, cycle). Any index is found without walking through earlier ones.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        """Share a cycle out by weight. Raises ConfigError where a source gets less than half a sample of one."""
        self.seed = seed
        self.quotas = quotas(weights, CYCLE)
        if not self.quotas.all():
            source = int(np.argmin(self.quotas))
            share = weights[source] / sum(weights)
            raise ConfigError(
                f"data.sources[{source}].weight: its share of the samples is {share:.2e}; at least 1/{CYCLE} is needed"
            )
        self._cycle = lru_cache(4)(self._make_cycle)

    def locate(self, sample: int) -> tuple[int, int]:
        """Return the source of global sample `sample` and the sample's index within the source."""
        if len(self.quotas) == 1:
            return 0, sample
        cycle, position = divmod(sample, CYCLE)
        sources, indices = self._cycle(cycle)
        source = int(sources[position])
        return source, cycle * int(self.quotas[source]) + int(indices[position])

    def _make_cycle(self, cycle: int) -> tuple[Int64, Int64]:
        """Return the source of each sample of a cycle, and its index among the cycle's samples of that source."""
        sources = np.repeat(np.arange(len(self.quotas)), self.quotas)
        sources = np.random.default_rng((self.seed, cycle)).permutation(sources)
        indices = np.zeros(CYCLE, np.int64)
        for source, quota in enumerate(self.quotas):
            indices[sources == source] = np.arange(quota)
        return sources, indices
