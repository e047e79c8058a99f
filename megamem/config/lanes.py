"""Which models can read lanes of joined documents that are never reset (`data.feeding: streams`)."""

from __future__ import annotations

from megamem.config.data import DataConfig
from megamem.config.model import ModelConfig


def check_lanes(model: ModelConfig, data: DataConfig) -> None:
    """Raise ValueError where a memory would keep every chunk of lanes that are never reset."""
    if (data.feeding, data.documents, data.reset) != ("streams", "join", "none"):
        return
    for layer in range(model.layers):
        mixer = model.mixer_at(layer)
        specs = mixer.state_specs(model.layer_model(layer)).values()
        if any(getattr(spec, "limit", 0) is None for spec in specs):
            raise ValueError(
                f"data.feeding streams with data.reset none: {mixer.kind} (model layer {layer}) would keep every "
                "chunk of an epoch; bound its max_chunks, or set data.reset exact"
            )
