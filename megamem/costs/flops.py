"""Floating-point operations per token, by formula: of the whole model (the numerator of MFU), its parts and chunks.

Matrix products only, a multiplication and an addition counting as two; norms, rotations, softmax and the optimizer are
left out, as is the forward pass that activation checkpointing repeats. Attention counts the keys that a query may see
(the causal triangle), not the rectangle some kernels compute, so that no kernel raises its MFU by wasted work.
"""

from __future__ import annotations

from collections import Counter

from megamem.config.cost import Flops, product
from megamem.config.model import MixerConfig, ModelConfig
from megamem.costs.parts import PartCosts


def dense_flops(model: ModelConfig, mixer: MixerConfig) -> float:
    """Return the forward FLOPs per token of a layer's weight matrices: the MLP's and the mixer's projections."""
    return 2.0 * (model.mlp_matrices + mixer.projection_parameters(model))


def head_flops(model: ModelConfig) -> int:
    """Return the forward FLOPs per token of the output head."""
    return 2 * model.hidden_size * model.resolved_padded_vocab_size


def rows_per_token(model: ModelConfig) -> float:
    """Return the rows that layers read for each token: more than one where an architecture adds rows to the chunks."""
    return model.layer_model.chunk_size / model.chunk_size


def flops_by_part(model: ModelConfig, sequence_length: int, causal: bool = True) -> dict[str, Flops]:
    """Return forward and backward FLOPs per token of each part of the model, averaged over a sequence from its start.

    Parts: `projections`, `mlp`, `head`, and what the mixers declare (`attention`, `memory_update`, ...).
    causal: count the causal triangle; False counts whole rectangles, as a kernel without a causal form computes them.
    """
    mixers = [model.mixer_at(layer) for layer in range(model.layers)]
    inside, rows = model.layer_model, rows_per_token(model)
    parts: dict[str, Flops] = {
        "projections": product(rows * 2 * sum(mixer.projection_parameters(inside) for mixer in mixers)),
        "mlp": product(rows * 2 * model.layers * model.mlp_matrices),
        "head": product(head_flops(model)),
    }
    # layers with equal mixers cost the same
    counts = Counter(mixer.model_dump_json() for mixer in mixers)
    for mixer in {mixer.model_dump_json(): mixer for mixer in mixers}.values():
        layers = rows * counts[mixer.model_dump_json()]
        for name, flops in mixer.mixing_flops(inside, round(rows * sequence_length), causal).items():
            more = Flops(layers * flops.forward, layers * flops.backward)
            parts[name] = parts[name] + more if name in parts else more
    return parts


def flops_per_token(model: ModelConfig, sequence_length: int) -> dict[str, float]:
    """Return FLOPs per token, averaged over sequences of `sequence_length` tokens.

    Keys: each part's forward (see `flops_by_part`), their sum `total`, `backward` (twice the forward, except for
    a memory's products with constant matrices, which hand on one gradient), and `training`, the sum of both passes.
    """
    parts = flops_by_part(model, sequence_length)
    forward = sum(part.forward for part in parts.values())
    backward = sum(part.backward for part in parts.values())
    return {
        **{name: part.forward for name, part in parts.items()},
        "total": forward,
        "backward": backward,
        "training": forward + backward,
    }


def flop_costs(model: ModelConfig, sequence_length: int) -> PartCosts:
    """Return the training FLOPs per token of each layer and the output head, averaged over a sequence.

    The embedding costs none: its rows are looked up.
    """
    layers = []
    inside, rows = model.layer_model, rows_per_token(model)
    for layer in range(model.layers):
        mixer = model.mixer_at(layer)
        mixing = mixer.mixing_flops(inside, round(rows * sequence_length), True).values()
        # the backward of a product with weights is two products: for the input's and for the weights' gradient
        own = 3 * dense_flops(inside, mixer) + sum(flops.forward + flops.backward for flops in mixing)
        layers.append(rows * own)
    return PartCosts(tuple(layers), 0.0, 3.0 * head_flops(model))


def layer_chunk_flops(model: ModelConfig, layer: int, chunks: int) -> list[Flops]:
    """Return the FLOPs per token of a layer for each chunk of a sequence: a memory that grows costs more later on.

    A chunk's share is what a sequence that ends with it costs more than one that ends before it.
    """
    mixer, inside, rows = model.mixer_at(layer), model.layer_model, rows_per_token(model)
    dense = dense_flops(inside, mixer)
    costs = []
    # mixing FLOPs of the sequence up to the chunk before, times its chunks
    forward_before = backward_before = 0.0
    for chunk in range(chunks):
        # what mixers declare is an average over the tokens of a sequence, which here is so many chunks long
        mixing = mixer.mixing_flops(inside, (chunk + 1) * inside.chunk_size, True).values()
        forward = (chunk + 1) * sum(flops.forward for flops in mixing)
        backward = (chunk + 1) * sum(flops.backward for flops in mixing)
        chunk_forward, chunk_backward = dense + forward - forward_before, 2 * dense + backward - backward_before
        costs.append(Flops(rows * chunk_forward, rows * chunk_backward))
        forward_before, backward_before = forward, backward
    return costs
