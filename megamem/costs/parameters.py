"""How many parameters a model has, by formula."""

from __future__ import annotations

from megamem.config.model import ModelConfig


def parameter_counts(model: ModelConfig) -> dict[str, int]:
    """Parameters of the whole model by part.

    Keys: `embedding` (with learned positions), `head` (0 if tied), `attention` (query, key, value and output
    projections), `mlp`, `norms` (with all biases), `memory` (what mixers have besides their projections), their sum
    `total`, and `non_embedding` (`total` without `embedding` and `head`).
    """
    hidden = model.hidden_size
    mixers = [model.mixer_at(layer) for layer in range(model.layers)]
    embedding = model.resolved_padded_vocab_size * hidden
    positions = (model.max_positions or 0) * hidden
    inner = {
        "attention": sum(mixer.projection_parameters(model) for mixer in mixers),
        "mlp": model.layers * model.mlp_matrices,
        "norms": model.layers * model.layer_vectors + model.norm_vectors,
        "memory": sum(mixer.extra_parameters(model) for mixer in mixers),
    }
    outer = {"embedding": embedding + positions, "head": 0 if model.tie_embeddings else embedding}
    non_embedding = sum(inner.values())
    return {**outer, **inner, "total": sum(outer.values()) + non_embedding, "non_embedding": non_embedding}
