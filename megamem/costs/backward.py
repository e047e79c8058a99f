"""What of a model's backward pass is left where some of its parameters are frozen."""

from __future__ import annotations

from dataclasses import dataclass

from megamem.config.cost import Flops


@dataclass(frozen=True)
class BackwardPass:
    """The reach of a backward pass, and the learning shares of the weight matrices in its way.

    A product with a frozen matrix hands on the gradient of its input alone, and layers below the lowest one that learns
    are never reached. In that lowest layer everything counts as if its input had a gradient: what of a mixer's own
    operations falls away there depends on the mixer, and it is one layer at most.
    """

    lowest: int
    """The lowest layer that gradients reach; the number of layers if only the output head learns."""
    enters: bool
    """Whether hidden states that enter the lowest layer have a gradient: something below all layers learns."""
    layer_matrices: tuple[int, ...]
    """The learning elements of the matrices of projections and MLP, for each layer."""
    embedding: float
    """Share of the embedding's elements that learn."""
    head: float
    """Share of the output head's matrix elements that learn."""

    def reached(self, layers: range) -> int:
        """Return how many of `layers` gradients reach."""
        return sum(layer >= self.lowest for layer in layers)


def layer_products(forward: float, layer: int, backward: BackwardPass | None) -> Flops:
    """Return the FLOPs per row of a layer's weight matrices. backward: what learns; all parameters if not given."""
    if backward is None:
        return Flops(forward, 2 * forward)
    reached = layer >= backward.lowest
    return Flops(forward, forward + 2.0 * backward.layer_matrices[layer] if reached else 0.0)


def reached_part(flops: Flops, layer: int, backward: BackwardPass | None) -> Flops:
    """Return a layer's FLOPs, without the backward pass where gradients do not reach it."""
    return flops if backward is None or layer >= backward.lowest else Flops(flops.forward, 0.0)


def embedding_products(forward: float, backward: BackwardPass | None) -> Flops:
    """Return the FLOPs per token of the embedding's projections."""
    return Flops(forward, 2 * forward * (1.0 if backward is None else backward.embedding))


def head_products(forward: float, layers: int, backward: BackwardPass | None) -> Flops:
    """Return the FLOPs per token of the output head above so many layers."""
    if backward is None:
        return Flops(forward, 2 * forward)
    return Flops(forward, forward * ((backward.enters or backward.lowest < layers) + backward.head))
