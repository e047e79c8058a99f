"""The number of parameters of a model, by formula."""

from __future__ import annotations

from dataclasses import dataclass

from megamem.config.adaptive import narrow_width
from megamem.config.model import MixerConfig, ModelConfig
from megamem.costs.parts import PartCosts


@dataclass(frozen=True)
class LayerParameters:
    """Parameters of one layer."""

    attention: int
    """Query, key, value and output projections."""
    mlp: int
    norms: int
    """Norms and all biases."""
    memory: int
    """Parameters of the mixer besides its projections."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.attention + self.mlp + self.norms + self.memory


def layer_parameters(model: ModelConfig) -> list[LayerParameters]:
    """Return the parameters of each layer."""
    layers = []
    for layer in range(model.layers):
        part = model.part(layer)
        mixer, inside = part.mixer, part.model
        memory = part.extra_parameters + mixer.extra_parameters(inside)
        memory -= mixer.shared_parameters(inside)
        rises = model.rows_rise_from(layer)
        memory -= mixer.shared_rising_parameters(inside) if rises else mixer.rising_parameters(inside)
        layers.append(
            LayerParameters(
                mixer.projection_parameters(inside), inside.mlp_matrices, layer_vectors(inside, mixer), memory
            )
        )
    return layers


def layer_vectors(model: ModelConfig, mixer: MixerConfig) -> int:
    """Return the parameters of one layer's norms and biases; model: as the layer sees it."""
    norms = 2 * model.norm_vectors
    if model.qk_norm:
        numbers = model.heads + model.resolved_kv_heads if model.qk_norm == "projection" else 2
        norms += numbers * model.resolved_head_dim * mixer.query_key_norms()
    if not model.bias:
        return norms
    norms += mixer.projection_biases(model)
    if not model.all_biases:
        return norms
    return norms + (2 if model.mlp == "swiglu" else 1) * model.resolved_ffn_size + model.hidden_size


def row_parameters(model: ModelConfig) -> int:
    """Return the parameters of learned rows beside the tokens: those of the architecture, and side rows."""
    side = model.side_rows
    learned = side.count if side is not None and side.source == "learned" else 0
    return model.architecture.extra_parameters(model) + learned * model.hidden_size


def cluster_parameters(model: ModelConfig) -> int:
    """Return the parameters of the words' vectors in adaptive input or softmax."""
    return sum(cluster.rows * cluster.width for cluster in model.clusters)


def shared_parameters(model: ModelConfig) -> int:
    """Return the parameters that layers share: one pair of u and v for all segment attention that wants it.

    Where memory rows look ahead, they share another v.
    """
    return sum(shared_vectors(model, range(model.layers)).values())


def shared_vectors(model: ModelConfig, layers: range) -> dict[str, int]:
    """Return the parameters that a stage with `layers` holds of those that layers share, by kind.

    Kinds: `pair`, one u and one v; `ahead`, one v of memory rows that look ahead.
    """
    vector = model.heads * model.resolved_head_dim
    mixers = [(model.mixer_at(layer), model.layer_model(layer)) for layer in layers]
    rising = [pair for layer, pair in zip(layers, mixers, strict=True) if model.rows_rise_from(layer)]
    return {
        "pair": 2 * vector if any(mixer.shared_parameters(inside) for mixer, inside in mixers) else 0,
        "ahead": vector if any(mixer.shared_rising_parameters(inside) for mixer, inside in rising) else 0,
    }


def embedding_parameters(model: ModelConfig) -> int:
    """Return the parameters of the embedding, projections and learned positions included."""
    if not model.architecture.embeds_tokens:
        return 0
    words = model.resolved_padded_vocab_size * model.hidden_size
    if model.adaptive and model.adaptive.input:
        words = cluster_parameters(model) + narrow_width(model.clusters, model.hidden_size) * model.hidden_size
    return words + (model.max_positions or 0) * model.hidden_size


def tied_parameters(model: ModelConfig) -> int:
    """Return the parameters of the embedding that the output head uses too."""
    if not model.tie_embeddings:
        return 0
    if model.adaptive is None:
        return model.resolved_padded_vocab_size * model.hidden_size
    projections = (
        narrow_width(model.clusters, model.hidden_size) * model.hidden_size if model.adaptive.tie_projections else 0
    )
    return cluster_parameters(model) + projections


def head_parameters(model: ModelConfig) -> int:
    """Return the parameters that the output head uses, tied ones among them."""
    if model.adaptive is None or not model.adaptive.softmax:
        return model.resolved_padded_vocab_size * model.hidden_size
    # words, the vectors that stand for clusters, projections
    rest = model.adaptive.cluster_rows + narrow_width(model.clusters, model.hidden_size)
    return cluster_parameters(model) + rest * model.hidden_size


def first_stage_parameters(model: ModelConfig) -> int:
    """Return what the first stage of a pipeline holds besides layers: the embedding, and rows beside the tokens."""
    return embedding_parameters(model) + row_parameters(model)


def parameter_counts(model: ModelConfig) -> dict[str, int]:
    """Return the parameters of the whole model by part.

    Keys: `embedding` (with learned positions), `head` (without what is tied), `attention` (query, key, value and output
    projections), `mlp`, `norms` (with all biases), `memory` (what mixers have besides their projections, and what
    memories that span the model and side rows have), their sum `total`, and `non_embedding` (`total` without
    `embedding` and `head`).
    """
    layers = layer_parameters(model)
    inner = {
        "attention": sum(layer.attention for layer in layers),
        "mlp": sum(layer.mlp for layer in layers),
        "norms": sum(layer.norms for layer in layers) + model.last_norm_vectors,
        "memory": sum(layer.memory for layer in layers) + row_parameters(model) + shared_parameters(model),
    }
    outer = {
        "embedding": embedding_parameters(model),
        "head": head_parameters(model) - tied_parameters(model),
    }
    non_embedding = sum(inner.values())
    return {**outer, **inner, "total": sum(outer.values()) + non_embedding, "non_embedding": non_embedding}


def parameter_costs(model: ModelConfig) -> PartCosts:
    """Return the parameters of each layer, the embedding and the output head with the last norm.

    Both ends of tied embeddings count the matrix, since the first and the last stage of a pipeline both hold it.
    """
    return PartCosts(
        tuple(float(layer.total) for layer in layer_parameters(model)),
        float(first_stage_parameters(model)),
        float(head_parameters(model) + model.last_norm_vectors),
    )
