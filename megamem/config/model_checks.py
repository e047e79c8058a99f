"""Checks of a model's heads, layers and positions, and of the options that only some layers can have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence


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


def check_rotation(head_dim: int, rotated: bool) -> None:
    """Raise ValueError where heads of an odd width are to be rotated."""
    if head_dim % 2 and rotated:
        raise ValueError(f"head_dim {head_dim} is odd; rotary positions need an even width")


def check_mixer(check: Callable[[], None], chunk_size: int, added: int, architecture: str) -> None:
    """Raise ValueError where a mixer does not fit the model, with the size of chunks as its layer sees them.

    Args:
        check: of the layer's mixer.
        chunk_size: tokens of a chunk.
        added: rows that the architecture adds to them.
        architecture: its kind.
    """
    try:
        check()
    except ValueError as error:
        if not added:
            raise
        rows = f"(chunk_size {chunk_size} and {added} rows of architecture {architecture})"
        raise ValueError(f"{error} {rows}") from None


def check_scaling(scaled: bool, rotated: bool) -> None:
    """Raise ValueError for `rope_scaling` in a model without rotations."""
    if scaled and not rotated:
        raise ValueError("rope_scaling: no layer rotates queries and keys by their positions; leave it out")


def check_softmax(
    mixers: Sequence[tuple[str, int]], qk_norm: bool | str, attention_dropout: float, bias: bool | str
) -> None:
    """Raise ValueError for options of softmax attention in a model that has none.

    mixers: kind and `MixerConfig.query_key_norms` of each layer's mixer.
    """
    if any(norms for _, norms in mixers):
        return
    if qk_norm:
        raise ValueError("qk_norm: no layer has softmax attention whose queries and keys it could normalize")
    if bias == "query_key_value":
        raise ValueError(f"bias {bias}: no layer has softmax attention, whose projections alone would have it")
    if attention_dropout:
        raise ValueError(
            f"attention_dropout {attention_dropout:g}: no layer has softmax attention with shares to drop (mixers: "
            f"{', '.join(dict.fromkeys(kind for kind, _ in mixers))}); use 0, or dropout for the residual stream"
        )
