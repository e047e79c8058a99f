"""What a mixer declares about its arithmetic, for the planner."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Flops:
    """Floating-point operations per token; a multiplication and an addition count as two."""

    forward: float
    """Of the forward pass."""
    backward: float
    """Of the backward pass."""

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.forward + other.forward, self.backward + other.backward)


def product(forward: float) -> Flops:
    """A matrix product of which both factors get gradients: its backward is two products."""
    return Flops(forward, 2 * forward)


def fixed_product(forward: float) -> Flops:
    """A matrix product with a constant factor: its backward is one product."""
    return Flops(forward, forward)


def attention_flops(heads: int, width: int, keys: float) -> Flops:
    """Scores and weighted values of one query over `keys` keys (an average, so not always whole)."""
    return product(4 * heads * width * keys)
