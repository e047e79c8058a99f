"""What of a model's configuration its predictions depend on, though no tensor of its weights shows it."""

from __future__ import annotations

from typing import Any

from megamem.config.model import ModelConfig

FIELDS = ("heads", "mlp", "norm_eps", "norm_position", "positions", "scale_embedding")
OF_ROTATIONS = ("rope_theta", "rope_scaling")


def settings_without_tensors(model: ModelConfig) -> dict[str, Any]:
    """Return the fields by which the same tensors make other predictions, as JSON has them, by name.

    Numbers of heads are those that are computed with, given or not; rotations are left out where positions are learned.
    """
    fields = (*FIELDS, *(OF_ROTATIONS if model.positions == "rotary" else ()))
    heads = {"kv_heads": model.resolved_kv_heads, "head_dim": model.resolved_head_dim}
    return {**model.model_dump(mode="json", include=set(fields)), **heads}
