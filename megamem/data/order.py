"""Orders: shuffles of an epoch and mixtures of sources, as pure functions of the seed and an index."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from megamem.data.store import Int64
from megamem.errors import ConfigError

BLOCK = 1024
"""Samples in a block of a mixture: every block holds the same number of each source's samples."""


def epoch_order(seed: Sequence[int], shard_ids: Int64, shuffle_shards: int) -> Int64:
    """[items] permutation of items that lie in files `shard_ids` [items].

    With `shuffle_shards`, files are put into random groups of that many, groups follow one another, and items
    are shuffled within a group; otherwise all items at once. Equal for equal seeds.
    """
    generator = np.random.default_rng(tuple(seed))
    if not shuffle_shards:
        return generator.permutation(len(shard_ids))
    group_of = generator.permutation(int(shard_ids.max()) + 1) // shuffle_shards
    return np.lexsort((generator.permutation(len(shard_ids)), group_of[shard_ids]))


def quotas(weights: Sequence[float], total: int) -> Int64:
    """[sources] integers that sum to `total` in proportion to `weights`, by largest remainder."""
    shares = np.asarray(weights, dtype=np.float64) / sum(weights) * total
    counts = np.floor(shares).astype(np.int64)
    by_remainder = np.argsort(-(shares - counts), kind="stable")
    counts[by_remainder[: total - int(counts.sum())]] += 1
    return counts


class Mixture:
    """Which source a sample comes from, and which of the source's samples it is.

    Every block of 1,024 samples holds each source's share exactly, rounded to 1/1024, in an order drawn from
    (seed, block). Any index is found without walking through earlier ones.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        """Raises ConfigError where a source's share is less than half a sample in a block."""
        self.seed = seed
        self.quotas = quotas(weights, BLOCK)
        if not self.quotas.all():
            source = int(np.argmin(self.quotas))
            share = weights[source] / sum(weights)
            raise ConfigError(
                f"data.sources[{source}].weight: its share of the samples is {share:.2e}; at least 1/{BLOCK} is needed"
            )
        self._block = lru_cache(4)(self._make_block)

    def locate(self, sample: int) -> tuple[int, int]:
        """(source, index within the source) of global sample `sample`."""
        if len(self.quotas) == 1:
            return 0, sample
        block, position = divmod(sample, BLOCK)
        sources, ranks = self._block(block)
        source = int(sources[position])
        return source, block * int(self.quotas[source]) + int(ranks[position])

    def _make_block(self, block: int) -> tuple[Int64, Int64]:
        """Source of each of the block's samples, and its rank among the block's samples of that source."""
        sources = np.repeat(np.arange(len(self.quotas)), self.quotas)
        sources = np.random.default_rng((self.seed, block)).permutation(sources)
        ranks = np.zeros(BLOCK, np.int64)
        for source, quota in enumerate(self.quotas):
            ranks[sources == source] = np.arange(quota)
        return sources, ranks
