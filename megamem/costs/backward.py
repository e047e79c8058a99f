"""What of a model's backward pass is left where some of its parameters are frozen."""

from __future__ import annotations

from dataclasses import dataclass

from megamem.config.cost import Flops


@dataclass(frozen=True)
class BackwardPass:
    """The reach of a backward pass, and the learning shares of the weight matrices in its way.

    A product with a frozen matrix hands on the gradient of its input alone, and layers that gradients do not reach have
    no backward pass. In the lowest layer that learns everything counts as if its input had a gradient: what of a
    mixer's own operations falls away there depends on the mixer, and it is one layer at most.
    """

    entered: tuple[bool, ...]
    """Whether the hidden states that enter a layer have a gradient, for each layer and then for the output head."""
    learns: tuple[bool, ...]
    """Whether a layer has parameters that learn, for each layer."""
    layer_matrices: tuple[int, ...]
    """The learning elements of the matrices of projections and MLP, for each layer."""
    extra: tuple[float, ...]
    """Share that is left of the backward pass of what an architecture adds to a layer, for each layer."""
    embedding: float
    """Share of the embedding's elements that learn."""
    head: float
    """Share of the output head's matrix elements that learn."""

    def reaches(self, layer: int) -> bool:
        """Return whether a layer has a backward pass."""
        return self.entered[layer] or self.learns[layer]

    def reached(self, layers: range) -> int:
        """Return how many of `layers` gradients reach."""
        return sum(map(self.reaches, layers))


def layer_products(forward: float, layer: int, backward: BackwardPass | None) -> Flops:
    """Return the FLOPs per row of a layer's weight matrices. backward: what learns; all parameters if not given."""
    if backward is None:
        return Flops(forward, 2 * forward)
    return Flops(forward, forward + 2.0 * backward.layer_matrices[layer] if backward.reaches(layer) else 0.0)


def share_left(layer: int, backward: BackwardPass | None, extra: bool) -> float:
    """Return the share that is left of the backward pass of a layer's mixer, or of what an architecture adds to it."""
    if backward is None:
        return 1.0
    return backward.extra[layer] if extra else float(backward.reaches(layer))


def embedding_products(forward: float, backward: BackwardPass | None) -> Flops:
    """Return the FLOPs per token of the embedding's projections."""
    return Flops(forward, 2 * forward * (1.0 if backward is None else backward.embedding))


def head_products(forward: float, backward: BackwardPass | None) -> Flops:
    """Return the FLOPs per token of the output head."""
    if backward is None:
        return Flops(forward, 2 * forward)
    return Flops(forward, forward * (backward.entered[-1] + backward.head))
