"""Floating-point operations per token, by formula: of the whole model (the numerator of MFU), its parts and chunks.

Matrix products only, a multiplication and an addition counting as two; norms, rotations, softmax and the optimizer are
left out, as is the forward pass that activation checkpointing repeats. Attention counts the keys that a query may see
(the causal triangle), not the rectangle some kernels compute, so that no kernel raises its MFU by wasted work.
"""

from __future__ import annotations

from collections import Counter

from megamem.config.adaptive import narrow_width
from megamem.config.cost import Flops, product
from megamem.config.model import MixerConfig, ModelConfig
from megamem.costs.parts import PartCosts


def dense_flops(model: ModelConfig, mixer: MixerConfig) -> float:
    """Return the forward FLOPs per token of a layer's weight matrices: the MLP's and the mixer's projections."""
    return 2.0 * (model.mlp_matrices + mixer.projection_parameters(model))


def embedding_flops(model: ModelConfig) -> int:
    """Return the forward FLOPs per token of the embedding: rows are looked up, and narrower ones are projected.

    Every token goes through the projections of all clusters, with zeros for those that it is not in.
    """
    if model.adaptive is None or not model.adaptive.input:
        return 0
    return 2 * model.hidden_size * narrow_width(model.clusters, model.hidden_size)


def head_flops(model: ModelConfig) -> float:
    """Return the forward FLOPs per token of the output head in training.

    Adaptive softmax scores a cluster's words for the tokens alone whose label is one of them. How many these are is not
    known before the text is: they are taken from Zipf's law (`AdaptiveConfig.shares`), by which words of rank r are as
    frequent as 1 / r. Text has fewer rare words than that, so it costs somewhat less.
    """
    adaptive, width = model.adaptive, model.hidden_size
    if adaptive is None or not adaptive.softmax:
        return 2 * width * model.resolved_padded_vocab_size
    shortlist, *others = model.clusters
    flops = 2.0 * width * (shortlist.rows + adaptive.cluster_rows)
    for cluster, share in zip(others, adaptive.shares(model.vocab_size)[1:], strict=True):
        projection = width if cluster.width < width else 0
        flops += 2.0 * share * cluster.width * (cluster.rows + projection)
    return flops


def flops_by_part(model: ModelConfig, sequence_length: int, causal: bool = True) -> dict[str, Flops]:
    """Return forward and backward FLOPs per token of each part of the model, averaged over a sequence from its start.

    Parts: `projections`, `mlp`, `head`, `embedding` where it has projections, and what the mixers declare
    (`attention`, `memory_update`, ...).
    causal: count the causal triangle; False counts whole rectangles, as a kernel without a causal form computes them.
    """
    mixers = [model.mixer_at(layer) for layer in range(model.layers)]
    inside = model.layer_model
    rows = [model.rows_through(layer) / model.chunk_size for layer in range(model.layers)]
    projected = sum(n * mixer.projection_parameters(inside) for n, mixer in zip(rows, mixers, strict=True))
    parts: dict[str, Flops] = {
        "projections": product(2 * projected),
        "mlp": product(2 * sum(rows) * model.mlp_matrices),
        "head": product(head_flops(model)),
    }
    if projections := embedding_flops(model):
        parts["embedding"] = product(projections)
    # layers with equal mixers cost the same
    kinds = [model.layer_kind(layer) for layer in range(model.layers)]
    for kind, count in Counter(kinds).items():
        layer = kinds.index(kind)
        layers = rows[layer] * count
        for name, flops in mixing_flops(model, layer, round(rows[layer] * sequence_length), causal).items():
            more = Flops(layers * flops.forward, layers * flops.backward)
            parts[name] = parts[name] + more if name in parts else more
    return parts


def mixing_flops(model: ModelConfig, layer: int, sequence_rows: int, causal: bool = True) -> dict[str, Flops]:
    """Return the FLOPs per row of a layer besides its projections, by name (`MixerConfig.mixing_flops`)."""
    mixer, inside = model.mixer_at(layer), model.layer_model
    if model.rows_end_at(layer):
        return mixer.top_mixing_flops(inside, sequence_rows, causal)
    parts = mixer.mixing_flops(inside, sequence_rows, causal)
    if model.rows_rise_from(layer):
        parts = {**parts, "side_rows": mixer.rising_flops(inside)}
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
    """Return the training FLOPs per token of each layer, embedding and output head, averaged over a sequence."""
    layers = []
    inside = model.layer_model
    for layer in range(model.layers):
        mixer = model.mixer_at(layer)
        rows = model.rows_through(layer) / model.chunk_size
        mixing = mixing_flops(model, layer, round(rows * sequence_length)).values()
        # the backward of a product with weights is two products: for the input's and for the weights' gradient
        own = 3 * dense_flops(inside, mixer) + sum(flops.forward + flops.backward for flops in mixing)
        layers.append(rows * own)
    return PartCosts(tuple(layers), 3.0 * embedding_flops(model), 3.0 * head_flops(model))


def layer_chunk_flops(model: ModelConfig, layer: int, chunks: int) -> list[Flops]:
    """Return the FLOPs per token of a layer for each chunk of a sequence: a memory that grows costs more later on.

    A chunk's share is what a sequence that ends with it costs more than one that ends before it.
    """
    mixer, inside = model.mixer_at(layer), model.layer_model
    size = model.rows_through(layer)
    rows = size / model.chunk_size
    dense = dense_flops(inside, mixer)
    costs = []
    # mixing FLOPs of the sequence up to the chunk before, times its chunks
    forward_before = backward_before = 0.0
    for chunk in range(chunks):
        # what mixers declare is an average over the tokens of a sequence, which here is so many chunks long
        mixing = mixing_flops(model, layer, (chunk + 1) * size).values()
        forward = (chunk + 1) * sum(flops.forward for flops in mixing)
        backward = (chunk + 1) * sum(flops.backward for flops in mixing)
        chunk_forward, chunk_backward = dense + forward - forward_before, 2 * dense + backward - backward_before
        costs.append(Flops(rows * chunk_forward, rows * chunk_backward))
        forward_before, backward_before = forward, backward
    return costs
