"""Random orders of any length that are computed place by place, so that no table of them exists."""

from collections.abc import Sequence
from math import isqrt

import numpy as np

from megamem.data.store import Int64

ROUNDS = 6
"""Rounds of the Feistel network. Four are pseudo-random for large sizes; small ones need more to reach all orders."""


class Permutation:
    """A pseudo-random permutation of 0 to `size` - 1, a pure function of its seed.

    A number below a * b is a pair (left, right) with left < a and right < b. Each round adds to one of the two a random
    number that belongs to the other, modulo its bound, which is a bijection (a Feistel network over unequal halves;
    Black and Rogaway 2002). a and b are near the root of the size, so the random numbers are few. What falls beyond the
    size goes through the rounds again until it does not (cycle walking).
    """

    def __init__(self, size: int, seed: Sequence[int]) -> None:
        """Draw the rounds' random numbers. seed: the numbers the order is drawn from."""
        assert size >= 1
        self.size = size
        left = isqrt(size - 1) + 1
        self._bounds = (left, -(-size // left))
        generator = np.random.default_rng(tuple(seed))
        sides = [round_ % 2 for round_ in range(ROUNDS)]
        self._rounds = [(side, generator.integers(0, self._bounds[side], self._bounds[1 - side])) for side in sides]

    def __call__(self, places: Int64) -> Int64:
        """Return the item at each of `places`, both [places]."""
        return self._walk(places, inverse=False)

    def places(self, items: Int64) -> Int64:
        """Return the place of each of `items`, both [items]."""
        return self._walk(items, inverse=True)

    def _walk(self, numbers: Int64, inverse: bool) -> Int64:
        """Apply the rounds until every result is below the size."""
        found = self._apply(numbers, inverse)
        while len(beyond := np.flatnonzero(found >= self.size)):
            found[beyond] = self._apply(found[beyond], inverse)
        return found

    def _apply(self, numbers: Int64, inverse: bool) -> Int64:
        """Apply all rounds once, the last one first for the inverse."""
        left = numbers // self._bounds[1]
        halves = [left, numbers - left * self._bounds[1]]
        for side, drawn in reversed(self._rounds) if inverse else self._rounds:
            bound, shift = self._bounds[side], drawn[halves[1 - side]]
            moved = halves[side] - shift if inverse else halves[side] + shift
            wrapped = moved + bound if inverse else moved - bound
            # one of the two is between 0 and the bound; as unsigned numbers negative ones are the largest
            halves[side] = np.minimum(moved.view(np.uint64), wrapped.view(np.uint64)).view(np.int64)
        return halves[0] * self._bounds[1] + halves[1]
