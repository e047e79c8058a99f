"""Which runs can read their windows layer by layer (`training.window_order: layers`)."""

from __future__ import annotations

from megamem.config.model import ModelConfig
from megamem.config.parallel import ParallelConfig


def check_window_order(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Raise ValueError if a model on such ranks cannot read all chunks of a window in a layer before the next layer."""
    taking = next((layer for layer in range(model.layers) if model.side_rows_at(layer) is not None), None)
    refused = {
        f"parallel.pp {parallel.pp}": parallel.pp > 1,
        f"model.architecture {model.architecture.kind}": model.architecture.kind != "decoder",
        f"the side rows of {model.mixer_at(taking or 0).kind} (model layer {taking})": taking is not None,
        f"model.dropout {model.dropout:g}": model.dropout > 0,
        "model.positions learned": model.positions == "learned",
    }
    for name, holds in refused.items():
        if holds:
            raise ValueError(f"training.window_order layers does not go with {name}; use chunks")
