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
from megamem.costs.backward import BackwardPass, embedding_products, head_products, layer_products, share_left
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


def flops_by_part(
    model: ModelConfig, sequence_length: int, causal: bool = True, backward: BackwardPass | None = None
) -> dict[str, Flops]:
    """Return forward and backward FLOPs per token of each part of the model, averaged over a sequence from its start.

    Parts: `projections`, `mlp`, `head`, `embedding` where it has projections, and what the mixers declare
    (`attention`, `memory_update`, ...).
    causal: count the causal triangle; False counts whole rectangles, as a kernel without a causal form computes them.
    backward: what is left of the backward pass where parameters are frozen; everything learns if not given.
    """
    layers = range(model.layers)
    insides = [model.layer_model(layer) for layer in layers]
    rows = [model.rows_through(layer) / model.chunk_size for layer in layers]
    # per token of the chunk, in each layer
    projections = [rows[i] * model.mixer_at(i).projection_parameters(insides[i]) for i in layers]
    mlps = [rows[i] * insides[i].mlp_matrices for i in layers]
    parts: dict[str, Flops] = {
        "projections": product(2 * sum(projections)),
        "mlp": product(2 * sum(mlps)),
        "head": head_products(head_flops(model), backward),
    }
    if backward is not None:
        # gradients of inputs where the pass comes by; those of learning matrices count with the projections'
        reached = [layer for layer in layers if backward.reaches(layer)]
        inputs = 2 * sum(projections[layer] for layer in reached)
        weights = 2 * sum(rows[layer] * backward.layer_matrices[layer] for layer in reached)
        parts["projections"] = Flops(2 * sum(projections), inputs + weights)
        parts["mlp"] = Flops(parts["mlp"].forward, 2 * sum(mlps[layer] for layer in reached))
    if embedding := embedding_flops(model):
        parts["embedding"] = embedding_products(embedding, backward)
    # layers with equal mixers cost the same
    kinds = [model.layer_kind(layer) for layer in layers]
    for kind, count in Counter(kinds).items():
        layer = kinds.index(kind)
        extra = model.part(layer).extra_flops
        alike = [other for other in layers if kinds[other] == kind]
        for name, flops in mixing_flops(model, layer, round(rows[layer] * sequence_length), causal).items():
            left = sum(share_left(other, backward, name in extra) for other in alike)
            more = Flops(rows[layer] * count * flops.forward, rows[layer] * left * flops.backward)
            parts[name] = parts[name] + more if name in parts else more
    return parts


def mixing_flops(model: ModelConfig, layer: int, sequence_rows: int, causal: bool = True) -> dict[str, Flops]:
    """Return the FLOPs per row of a layer besides its projections, by name (`MixerConfig.mixing_flops`)."""
    part = model.part(layer)
    mixer, inside = part.mixer, part.model
    if part.restarts:
        sequence_rows = min(sequence_rows, inside.chunk_size)
    if model.rows_end_at(layer):
        return mixer.top_mixing_flops(inside, sequence_rows, causal)
    parts = mixer.mixing_flops(inside, sequence_rows, causal)
    if model.rows_rise_from(layer) and (rising := mixer.rising_flops(inside)).forward:
        parts = {**parts, "side_rows": rising}
    # given per token of the chunk
    share = model.chunk_size / model.rows_through(layer)
    extra = {name: Flops(share * flops.forward, share * flops.backward) for name, flops in part.extra_flops.items()}
    return {**parts, **extra}


def _mixing_left(model: ModelConfig, layer: int, sequence_rows: int, backward: BackwardPass | None) -> list[Flops]:
    """Return `mixing_flops` with what is left of their backward pass."""
    extra = model.part(layer).extra_flops
    return [
        Flops(flops.forward, flops.backward * share_left(layer, backward, name in extra))
        for name, flops in mixing_flops(model, layer, sequence_rows).items()
    ]


def flops_per_token(
    model: ModelConfig, sequence_length: int, backward_pass: BackwardPass | None = None
) -> dict[str, float]:
    """Return FLOPs per token, averaged over sequences of `sequence_length` tokens.

    Keys: each part's forward (see `flops_by_part`), their sum `total`, `backward` (twice the forward, except for
    a memory's products with constant matrices, which hand on one gradient), and `training`, the sum of both passes.
    backward_pass: what is left of it where parameters are frozen; everything learns if not given.
    """
    parts = flops_by_part(model, sequence_length, backward=backward_pass)
    forward = sum(part.forward for part in parts.values())
    backward = sum(part.backward for part in parts.values())
    return {
        **{name: part.forward for name, part in parts.items()},
        "total": forward,
        "backward": backward,
        "training": forward + backward,
    }


def flop_costs(model: ModelConfig, sequence_length: int, backward: BackwardPass | None = None) -> PartCosts:
    """Return the training FLOPs per token of each layer, embedding and output head, averaged over a sequence.

    backward: what is left of the backward pass where parameters are frozen; everything learns if not given.
    """
    layers = []
    for layer in range(model.layers):
        mixer, inside = model.mixer_at(layer), model.layer_model(layer)
        rows = model.rows_through(layer) / model.chunk_size
        mixing = _mixing_left(model, layer, round(rows * sequence_length), backward)
        dense = layer_products(dense_flops(inside, mixer), layer, backward)
        own = dense.total + sum(flops.total for flops in mixing)
        layers.append(rows * own)
    embedding = embedding_products(embedding_flops(model), backward)
    return PartCosts(tuple(layers), embedding.total, head_products(head_flops(model), backward).total)


def layer_chunk_flops(
    model: ModelConfig, layer: int, chunks: int, backward_pass: BackwardPass | None = None
) -> list[Flops]:
    """Return the FLOPs per token of a layer for each chunk of a sequence: a memory that grows costs more later on.

    A chunk's share is what a sequence that ends with it costs more than one that ends before it.
    backward_pass: what is left of it where parameters are frozen; everything learns if not given.
    """
    mixer, inside = model.mixer_at(layer), model.layer_model(layer)
    size = model.rows_through(layer)
    rows = size / model.chunk_size
    dense = layer_products(dense_flops(inside, mixer), layer, backward_pass)
    costs = []
    # mixing FLOPs of the sequence up to the chunk before, times its chunks
    forward_before = backward_before = 0.0
    for chunk in range(chunks):
        # what mixers declare is an average over the tokens of a sequence, which here is so many chunks long
        mixing = _mixing_left(model, layer, (chunk + 1) * size, backward_pass)
        forward = (chunk + 1) * sum(flops.forward for flops in mixing)
        backward = (chunk + 1) * sum(flops.backward for flops in mixing)
        chunk_forward, chunk_backward = dense.forward + forward - forward_before, dense.backward + backward
        costs.append(Flops(rows * chunk_forward, rows * (chunk_backward - backward_before)))
        forward_before, backward_before = forward, backward
    return costs
