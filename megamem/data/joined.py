"""Text of a source's documents laid end to end, in a new random order every epoch, found at any token by its number.

No table of the order exists: it is a keyed permutation, and the sums of tokens at every 128th place lead to any token.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from megamem.data.permutation import Permutation
from megamem.data.store import DocumentStore, Int64

PLACES = 128
"""Places of an order between two sums of tokens: 8 bytes are kept for so many documents."""
PIECE = 1 << 14
"""Documents that are put into order at a time: arrays of so many stay in the processor's cache."""
BLOCKS = 256
"""Blocks of `PLACES` documents of all groups that are kept at hand, for lanes that read at different places."""


@dataclass(frozen=True)
class Stretch:
    """Consecutive tokens of joined text."""

    tokens: Int64
    """[tokens] the tokens."""
    begins: Int64
    """Places in `tokens` where documents begin, ascending."""
    position: int
    """Place of the first token in its document."""


class JoinedText:
    """All documents of a source, one after the other, in an order drawn anew for every epoch.

    Each document's own last token, the end of document, stands between it and the next. Shards are put into random
    groups of `shuffle_shards`, groups follow one another, and documents are shuffled within a group.
    """

    def __init__(self, store: DocumentStore, seed: tuple[int, int], shuffle_shards: int = 0) -> None:
        """Count the tokens of each shard; orders are made when they are read.

        Args:
            store: the source.
            seed: the configuration's seed and the source's number.
            shuffle_shards: shards of a group; 0 shuffles the whole source.
        """
        self.store = store
        self.seed = seed
        self.shuffle_shards = shuffle_shards
        borders = store.shard_borders.tolist()
        self.shard_tokens: Int64 = np.array([store.lengths[a:b].sum() for a, b in pairwise(borders)], np.int64)
        """[shards] tokens of each shard."""
        self.tokens = int(self.shard_tokens.sum())
        """Tokens of an epoch."""
        self.epoch = lru_cache(2)(self._make_epoch)
        """From an epoch's number to its order."""
        self.block = lru_cache(BLOCKS)(_block)
        """From a group of documents and a block's number to the block; see `Group.make_block`."""

    def read(self, epoch: int, start: int, stop: int) -> Stretch:
        """Return tokens `start` to `stop` - 1 of an epoch's text."""
        assert 0 <= start < stop <= self.tokens, (start, stop, self.tokens)
        tokens = np.empty(stop - start, np.int64)
        begins: list[int] = []
        at, position = 0, -1
        for document, first, last in self.epoch(epoch).slices(start, stop):
            tokens[at : at + last - first] = self.store.tokens(document, first, last)
            if first == 0:
                begins.append(at)
            if position < 0:
                position = first
            at += last - first
        return Stretch(tokens, np.array(begins, np.int64), position)

    def _make_epoch(self, epoch: int) -> "Epoch":
        seed = (*self.seed, epoch)
        shards = len(self.shard_tokens)
        if not self.shuffle_shards:
            return Epoch(self, [np.arange(shards)], seed)
        order = np.random.default_rng(seed).permutation(shards)
        return Epoch(self, np.split(order, range(self.shuffle_shards, shards, self.shuffle_shards)), seed)


class Epoch:
    """The order of an epoch: groups of shards one after the other."""

    def __init__(self, text: JoinedText, groups: list[Int64], seed: tuple[int, ...]) -> None:
        """Lay out groups of shards. seed: the numbers the order is drawn from."""
        self.text = text
        self.groups = groups
        self.seed = seed
        self.ends: Int64 = np.cumsum([text.shard_tokens[shards].sum() for shards in groups])
        """[groups] number of the token after each group's last one."""
        self.group = lru_cache(None)(self._make_group)
        """From a group's number to its order, made when it is first read."""

    def slices(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Return (document, first token, token after the last) of all documents within tokens `start` to `stop` - 1."""
        found = []
        while start < stop:
            number = int(np.searchsorted(self.ends, start, side="right"))
            group_start = int(self.ends[number - 1]) if number else 0
            until = min(stop, int(self.ends[number]))
            found += self.group(number).slices(start - group_start, until - group_start)
            start = until
        return found

    def _make_group(self, number: int) -> "Group":
        return Group(self.text, np.sort(self.groups[number]), (*self.seed, number))


class Group:
    """The order of the documents of some shards."""

    def __init__(self, text: JoinedText, shards: Int64, seed: tuple[int, ...]) -> None:
        """Sum up the tokens in order.

        Args:
            text: that of the source.
            shards: numbers of the shards, ascending.
            seed: the numbers the order is drawn from.
        """
        self.text, store = text, text.store
        self.lengths = store.lengths
        first_documents, sizes = store.shard_borders[shards], np.diff(store.shard_borders)[shards]
        self.shard_ends = np.cumsum(sizes)
        """[shards] number, within the group, of the document after each shard's last one."""
        self.offsets = first_documents + sizes - self.shard_ends
        """[shards] what a document's number in the source is more than its number in the group."""
        self.documents = int(self.shard_ends[-1])
        self.order = Permutation(max(self.documents, 1), seed)
        sums = np.zeros(-(-self.documents // PLACES) + 1, np.int64)
        for first, size, offset in zip(first_documents.tolist(), sizes.tolist(), self.offsets.tolist(), strict=True):
            for at in range(first, first + size, PIECE):
                # documents are read as they lie in the table, which disk and cache like, and counted at their places
                documents = np.arange(at, min(at + PIECE, first + size))
                blocks = self.order.places(documents - offset) // PLACES
                # a column of a mapped table is not aligned, which `add.at` is slow with
                np.add.at(sums, blocks + 1, self.lengths[at : at + len(documents)].copy())
        self.sums = np.cumsum(sums)
        """[blocks + 1] tokens before each block of `PLACES` places, and all tokens."""

    def slices(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """See `Epoch.slices`; tokens are counted from the start of the group."""
        number = int(np.searchsorted(self.sums, start, side="right")) - 1
        found: list[tuple[int, int, int]] = []
        while start < stop:
            documents, ends = self.text.block(self, number)
            # documents of which nothing is read, empty ones among them, are outside of this range
            for place in range(bisect_right(ends, start), min(bisect_left(ends, stop) + 1, len(documents))):
                begin = ends[place - 1] if place else int(self.sums[number])
                end = min(ends[place], stop)
                if end > start:
                    found.append((documents[place], start - begin, end - begin))
                    start = end
            number += 1
        return found

    def make_block(self, number: int) -> tuple[list[int], list[int]]:
        """Return documents of a block and the number of the token after each, both [documents of the block]."""
        places = np.arange(number * PLACES, min((number + 1) * PLACES, self.documents))
        members = self.order(places)
        documents = members + self.offsets[np.searchsorted(self.shard_ends, members, side="right")]
        return documents.tolist(), (self.sums[number] + np.cumsum(self.lengths[documents])).tolist()


def _block(group: Group, number: int) -> tuple[list[int], list[int]]:
    """See `Group.make_block`. Groups share one bound on what is remembered: over an epoch there are many."""
    return group.make_block(number)
