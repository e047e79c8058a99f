"""Floating-point operations per token, by formula: of the whole model (the numerator of MFU), its parts and chunks.

Matrix products only, a multiplication and an addition counting as two; norms, rotations, softmax and the optimizer are
left out, as is the forward pass that activation checkpointing repeats. Attention counts the keys that a query may see
(the causal triangle), not the rectangle some kernels compute, so that no kernel raises its MFU by wasted work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

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
    # per token, in each layer
    rows = [sum(chunk_rows(model, layer, sequence_length)) / sequence_length for layer in layers]
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
        for name, flops in mixing_flops(model, layer, sequence_length, causal).items():
            left = sum(share_left(other, backward, name in extra) for other in alike)
            more = Flops(count * flops.forward, left * flops.backward)
            parts[name] = parts[name] + more if name in parts else more
    return parts


def chunk_rows(model: ModelConfig, layer: int, sequence_length: int) -> list[int]:
    """Return the rows that go through a layer with each chunk of a sequence; a last one that is cut has its share."""
    size, chunks = model.chunk_size, -(-sequence_length // model.chunk_size)
    rows = [*model.part(layer).growing[:chunks]]
    rows += [model.rows_through(layer)] * (chunks - len(rows))
    if rest := sequence_length % size:
        rows[-1] = round(rows[-1] * rest / size)
    return rows


def mixing_flops(model: ModelConfig, layer: int, sequence_length: int, causal: bool = True) -> dict[str, Flops]:
    """Return the FLOPs per token of a layer besides its projections, by name, averaged over a sequence."""
    part, rows = model.part(layer), chunk_rows(model, layer, sequence_length)
    texts = Counter(rows) if part.restarts else {sum(rows): 1}
    parts = dict(part.extra_flops)
    for length, times in texts.items():
        for name, flops in row_flops(model, layer, length, causal).items():
            more = flops.times(times * length / sequence_length)
            parts[name] = parts[name] + more if name in parts else more
    return parts


def row_flops(model: ModelConfig, layer: int, rows: int, causal: bool = True) -> Mapping[str, Flops]:
    """Return a mixer's FLOPs for each of so many rows of one text, by name (`MixerConfig.mixing_flops`)."""
    mixer, inside = model.mixer_at(layer), model.layer_model(layer)
    if model.rows_end_at(layer):
        return mixer.top_mixing_flops(inside, rows, causal)
    parts = mixer.mixing_flops(inside, rows, causal)
    if model.rows_rise_from(layer) and (rising := mixer.rising_flops(inside)).forward:
        return {**parts, "side_rows": rising}
    return parts


def left_of(flops: Flops, share: float) -> Flops:
    """Return FLOPs of which `share` is left of the backward pass."""
    return Flops(flops.forward, share * flops.backward)


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
        rows = sum(chunk_rows(model, layer, sequence_length)) / sequence_length
        extra = model.part(layer).extra_flops
        mixing = [
            left_of(flops, share_left(layer, backward, name in extra))
            for name, flops in mixing_flops(model, layer, sequence_length).items()
        ]
        dense = layer_products(dense_flops(inside, mixer), layer, backward)
        layers.append(rows * dense.total + sum(flops.total for flops in mixing))
    embedding = embedding_products(embedding_flops(model), backward)
    return PartCosts(tuple(layers), embedding.total, head_products(head_flops(model), backward).total)


def layer_chunk_flops(
    model: ModelConfig, layer: int, chunks: int, backward_pass: BackwardPass | None = None
) -> list[Flops]:
    """Return the FLOPs per token of a layer for each chunk of a sequence: a memory that grows costs more later on.

    A chunk's share is what a sequence that ends with it costs more than one that ends before it.
    backward_pass: what is left of it where parameters are frozen; everything learns if not given.
    """
    part, nothing = model.part(layer), Flops(0.0, 0.0)
    dense = layer_products(dense_flops(part.model, part.mixer), layer, backward_pass)
    extra = sum(part.extra_flops.values(), nothing).times(model.chunk_size)
    extra = left_of(extra, share_left(layer, backward_pass, True))
    costs = []
    # of the layer's text before the chunk
    rows_before, mixing_before = 0, nothing
    for rows in chunk_rows(model, layer, chunks * model.chunk_size):
        # what mixers declare is an average over the rows of a text, which here ends with the chunk
        length = rows_before + rows
        mixing = sum(row_flops(model, layer, length).values(), nothing).times(length)
        own = left_of(mixing + mixing_before.times(-1), share_left(layer, backward_pass, False))
        costs.append((dense.times(rows) + own + extra).times(1 / model.chunk_size))
        if not part.restarts:
            rows_before, mixing_before = length, mixing
    return costs
