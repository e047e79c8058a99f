"""Small configurations of architectures besides the decoder, and of mixers whose rows rise from layer to layer."""

from __future__ import annotations

from typing import Any

from tests.contract.case import QK_NORM, Case

RISING = {"kind": "melodi", "form": "rising"}
LAMEMO: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    ("lamemo", 1, {}, {}),
    ("lamemo_short", 2, {"memory_length": 3}, {}),
    ("lamemo_long", 1, {"memory_length": 19}, {}),
    ("lamemo_signed", 1, {"positions": "transformer_xl"}, {}),
    ("lamemo_forgetting", 1, {"interpolate": False}, {}),
    ("lamemo_backward", 1, {"memory_length": 11, "look_ahead": False}, {}),
    ("lamemo_unordered", 1, {"memory_length": 13, "order_mask": False}, {}),
    ("lamemo_unordered_signed", 1, {"memory_length": 5, "order_mask": False, "positions": "transformer_xl"}, {}),
    ("lamemo_shared", 2, {"memory_length": 10, "shared_biases": True}, QK_NORM),
]
ENCODER = {"layers": 1, "hidden_size": 8, "heads": 4, "ffn_size": 12}
MEMORY_MODELS: list[tuple[str, int, dict[str, Any], str | dict[str, Any], dict[str, Any]]] = [
    ("fixed", 1, {"encoder": {"layers": 1}, "slots": 12}, "local_attention", {}),
    (
        "narrow",
        2,
        {
            "encoder": {**ENCODER, "layers": 2},
            "memories_per_chunk": 2,
            "slots": 2,
            "overflow": "drop_oldest",
            "compressed_size": 5,
            "fill": "zeros",
        },
        "local_attention",
        {},
    ),
    ("variable", 1, {"encoder": {"layers": 1}, "slots": 3, "positions": "variable"}, "local_attention", {}),
    ("control", 1, {"slots": 2}, "local_attention", {}),
    (
        "delta_net",
        1,
        {"encoder": {**ENCODER, "mixer": "retnet"}, "slots": 2, "overflow": "drop_oldest"},
        {"kind": "delta_net"},
        {},
    ),
]
ALL_ARCHITECTURES = [
    Case("decoder", "rising", {}, inside={**RISING, "summaries": 4}),
    Case(
        "decoder",
        "rising_apart",
        {},
        queries_per_key=2,
        core=False,
        inside={**RISING, "summaries": 2, "memories": 3, "long_memory": 7, "long_increment": 2, "gate_init": -1.0},
    ),
    Case("decoder", "rising_one", {}, core=False, inside={**RISING, "summaries": 1}),
    *(
        Case("decoder", name, {}, per_key, name == "lamemo", {"kind": "lamemo", **options}, shape)
        for name, per_key, options, shape in LAMEMO
    ),
    Case("recurrent_memory", "read_write", {"memory_tokens": 2}, inside="local_attention"),
    *(
        Case("memory_model", name, options, per_key, name == "fixed", inside, shape)
        for name, per_key, options, inside, shape in MEMORY_MODELS
    ),
    Case(
        "recurrent_memory",
        "overwrite",
        {"memory_tokens": 1, "form": "overwrite"},
        queries_per_key=2,
        core=False,
        inside="full_attention",
    ),
    # float64 rounding of a memory that goes through DeltaNet's layers grows to 2e-11 in three chunks with weights of
    # 0.3, with 0.1 it stays at 1e-14: there the laws' 1e-12 tells faults from rounding
    Case("recurrent_memory", "delta_net", {"memory_tokens": 4}, core=False, inside={"kind": "delta_net"}, init_std=0.1),
    Case(
        "recurrent_memory",
        "titans",
        {"memory_tokens": 2},
        queries_per_key=2,
        core=False,
        inside={"kind": "titans", "inner_chunk": 4, "expansion": 2, "max_rate": 0.05},
    ),
    Case(
        "recurrent_memory", "elastic", {"memory_tokens": 2}, core=False, inside={"kind": "elastic_memory", "order": 5}
    ),
]
