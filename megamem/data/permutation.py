"""Random orders of any length that are computed place by place, so that no table of them exists."""

from collections.abc import Sequence
from math import isqrt

import numpy as np
import numpy.typing as npt

from megamem.data.store import Int64

ROUNDS = 6
"""Rounds of the Feistel network. Four are pseudo-random for large sizes; small ones need more to reach all orders."""
UInt64 = npt.NDArray[np.uint64]


class Permutation:
    """A pseudo-random permutation of 0 to `size` - 1, a pure function of its seed.

    A number below a * b is a pair (left, right) with left < a and right < b. Each round adds to one of the two a keyed
    hash of the other, modulo its bound, which is a bijection (a Feistel network over unequal halves; Black and Rogaway
    2002). a and b are near the root of the size, and what falls beyond the size goes through the rounds again until it
    does not (cycle walking).
    """

    def __init__(self, size: int, seed: Sequence[int]) -> None:
        """Draw the rounds' keys. seed: the numbers the order is drawn from."""
        assert size >= 1
        self.size = size
        left = isqrt(size - 1) + 1
        self._bounds = (np.uint64(left), np.uint64(-(-size // left)))
        keys = np.random.default_rng(tuple(seed)).integers(0, 2**64, ROUNDS, np.uint64)
        self._rounds = [(round_ % 2, key) for round_, key in enumerate(keys)]

    def __call__(self, places: Int64) -> Int64:
        """Return the item at each of `places`, both [places]."""
        return self._walk(places, inverse=False)

    def places(self, items: Int64) -> Int64:
        """Return the place of each of `items`, both [items]."""
        return self._walk(items, inverse=True)

    def _walk(self, numbers: Int64, inverse: bool) -> Int64:
        """Apply the rounds until every result is below the size."""
        found = self._apply(numbers.astype(np.uint64), inverse)
        while len(beyond := np.flatnonzero(found >= self.size)):
            found[beyond] = self._apply(found[beyond], inverse)
        return found.astype(np.int64)

    def _apply(self, numbers: UInt64, inverse: bool) -> UInt64:
        """Apply all rounds once, the last one first for the inverse."""
        left = numbers // self._bounds[1]
        halves = [left, numbers - left * self._bounds[1]]
        for side, key in reversed(self._rounds) if inverse else self._rounds:
            bound = self._bounds[side]
            shift = _hash(halves[1 - side] ^ key)
            # the upper half of the hash, scaled to 0 .. bound - 1
            shift *= bound
            shift >>= np.uint64(32)
            moved = halves[side] + (bound - shift if inverse else shift)
            # modulo the bound: unsigned numbers below it wrap around to huge ones
            halves[side] = np.minimum(moved, moved - bound)
        return halves[0] * self._bounds[1] + halves[1]


def _hash(values: UInt64) -> UInt64:
    """Return 32 well-mixed bits of each value, which is overwritten (the finalizer of SplitMix64, shortened)."""
    values *= np.uint64(0x9E3779B97F4A7C15)
    values ^= values >> np.uint64(29)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values >>= np.uint64(32)
    return values
