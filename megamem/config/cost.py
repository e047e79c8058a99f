"""What a mixer declares about its arithmetic, for the planner."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Flops:
    """Floating-point operations per token; a multiplication and an addition count as two."""

    forward: float
    """Operations of the forward pass."""
    backward: float
    """Operations of the backward pass."""

    def __add__(self, other: Flops) -> Flops:
        """Return the sum, pass by pass."""
        return Flops(self.forward + other.forward, self.backward + other.backward)

    def times(self, factor: float) -> Flops:
        """Return `factor` times as many."""
        return Flops(factor * self.forward, factor * self.backward)

    @property
    def total(self) -> float:
        """Operations of both passes."""
        return self.forward + self.backward


def product(forward: float) -> Flops:
    """Return the operations of a matrix product of which both factors get gradients: its backward is two products."""
    return Flops(forward, 2 * forward)


def fixed_product(forward: float) -> Flops:
    """Return the operations of a matrix product with a constant factor: its backward is one product."""
    return Flops(forward, forward)


def attention_flops(heads: int, width: int, keys: float) -> Flops:
    """Return the operations of one query's scores and weighted values.

    Args:
        heads: query heads.
        width: channels of a head.
        keys: keys that the query sees: an average, so not always a whole number.
    """
    return product(4 * heads * width * keys)
