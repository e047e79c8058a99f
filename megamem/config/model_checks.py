"""Checks of a model's heads, layers and positions, and of the options that only some layers can have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def check_heads(hidden_size: int, heads: int, kv_heads: int, head_dim: int | None) -> None:
    """Raise ValueError where heads do not divide the hidden size, or key/value heads the query heads."""
    if head_dim is None and hidden_size % heads:
        raise ValueError(
            f"hidden_size {hidden_size} is not divisible by heads {heads}; choose a multiple or give head_dim"
        )
    if heads % kv_heads:
        raise ValueError(f"heads {heads} is not a multiple of kv_heads {kv_heads}")


def check_layers(layers: int, named: Iterable[int]) -> None:
    """Raise ValueError where `model.memory` names a layer beyond the `layers` that there are, or one twice."""
    seen: set[int] = set()
    for layer in named:
        if layer >= layers:
            raise ValueError(f"memory.layers: {layer} does not exist; layers go from 0 to {layers - 1}")
        if layer in seen:
            raise ValueError(f"memory.layers: layer {layer} has two mixers")
        seen.add(layer)


def check_positions(positions: str, max_positions: int | None, chunk_size: int) -> None:
    """Raise ValueError where the table of learned positions is missing, not wanted, or ends inside a chunk."""
    if (positions == "learned") != (max_positions is not None):
        raise ValueError(
            f"max_positions {max_positions} does not go with positions {positions}; learned positions "
            "need it, rotary ones have no table"
        )
    if max_positions is not None and max_positions % chunk_size:
        raise ValueError(
            f"max_positions {max_positions} is not a multiple of chunk_size {chunk_size}: the table "
            "would begin again inside a chunk"
        )


def check_side_rows(kinds: Sequence[str], side_rows: Sequence[int], architecture: str) -> None:
    """Raise ValueError where layers do not agree on the side rows they share, or nobody would carry them.

    kinds, side_rows: of each layer's mixer; architecture: the kind of the model's.
    """
    counts: dict[int, int] = {}
    for layer, count in enumerate(side_rows):
        if count:
            counts.setdefault(count, layer)
    if len(counts) > 1:
        given = " and ".join(f"{count} (layer {layer})" for count, layer in counts.items())
        raise ValueError(f"layers share one set of side rows, but are given {given}; use one number for all")
    if counts and architecture != "decoder":
        (layer,) = counts.values()
        raise ValueError(
            f"architecture {architecture} carries no side rows, which {kinds[layer]} (layer {layer}) takes up the "
            "layers; use architecture decoder"
        )


def check_softmax(mixers: Sequence[tuple[str, int]], qk_norm: bool, attention_dropout: float) -> None:
    """Raise ValueError for options of softmax attention in a model that has none.

    mixers: kind and `MixerConfig.query_key_norms` of each layer's mixer.
    """
    if any(norms for _, norms in mixers):
        return
    if qk_norm:
        raise ValueError("qk_norm: no layer has softmax attention whose queries and keys it could normalize")
    if attention_dropout:
        raise ValueError(
            f"attention_dropout {attention_dropout:g}: no layer has softmax attention with shares to drop (mixers: "
            f"{', '.join(dict.fromkeys(kind for kind, _ in mixers))}); use 0, or dropout for the residual stream"
        )
