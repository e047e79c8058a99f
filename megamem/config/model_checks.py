"""Checks of a model's shape: sizes that divide, layers that exist, rows that someone carries."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megamem.config.model import ModelConfig


def check_sizes(model: ModelConfig) -> None:
    """Raise ValueError where heads, widths, vocabulary or positions do not fit each other."""
    if model.head_dim is None and model.hidden_size % model.heads:
        raise ValueError(
            f"hidden_size {model.hidden_size} is not divisible by heads {model.heads}; "
            "choose a multiple or give head_dim"
        )
    rotated = [layer for layer in range(model.layers) if model.mixer_at(layer).rotates()]
    if model.resolved_head_dim % 2 and model.positions == "rotary" and rotated:
        raise ValueError(f"head_dim {model.resolved_head_dim} is odd; rotary positions need an even width")
    if model.heads % model.resolved_kv_heads:
        raise ValueError(f"heads {model.heads} is not a multiple of kv_heads {model.resolved_kv_heads}")
    if model.resolved_padded_vocab_size < model.vocab_size:
        raise ValueError(f"padded_vocab_size {model.padded_vocab_size} is below vocab_size {model.vocab_size}")
    if (model.positions == "learned") != (model.max_positions is not None):
        raise ValueError(
            f"max_positions {model.max_positions} does not go with positions {model.positions}; learned positions "
            "need it, rotary ones have no table"
        )
    if model.max_positions is not None and model.max_positions % model.chunk_size:
        raise ValueError(
            f"max_positions {model.max_positions} is not a multiple of chunk_size {model.chunk_size}: the table "
            "would begin again inside a chunk"
        )


def check_layers(model: ModelConfig) -> None:
    """Raise ValueError where `memory` names a layer that does not exist, or one twice."""
    seen: set[int] = set()
    for entry in model.memory:
        for layer in entry.layers:
            if layer >= model.layers:
                raise ValueError(f"memory.layers: {layer} does not exist; layers go from 0 to {model.layers - 1}")
            if layer in seen:
                raise ValueError(f"memory.layers: layer {layer} has two mixers")
            seen.add(layer)


def check_side_rows(model: ModelConfig) -> None:
    """Raise ValueError where layers do not agree on the side rows they share, or nobody would carry them."""
    inner, counts = model.layer_model, dict[int, int]()
    for layer in range(model.layers):
        if count := model.mixer_at(layer).side_rows(inner):
            counts.setdefault(count, layer)
    if len(counts) > 1:
        given = " and ".join(f"{count} (layer {layer})" for count, layer in counts.items())
        raise ValueError(f"layers share one set of side rows, but are given {given}; use one number for all")
    if counts and model.architecture.kind != "decoder":
        (layer,) = counts.values()
        raise ValueError(
            f"architecture {model.architecture.kind} carries no side rows, which {model.mixer_at(layer).kind} "
            f"(layer {layer}) takes up the layers; use architecture decoder"
        )
