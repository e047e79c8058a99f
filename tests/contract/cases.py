"""Small configurations of every registered mixer and architecture.

`caching_cases.py`, `log_linear_cases.py` and `whole_models.py` hold those that are of a kind with many forms.

Add at least one entry for each, and one for every option that changes what passes from call to call.
"""

from __future__ import annotations

import os

from tests.contract.caching_cases import CACHING
from tests.contract.case import FEW_CHANNELS, PROJECTION_NORM, QK_NORM, Case
from tests.contract.log_linear_cases import LOG_LINEAR
from tests.contract.paths import PATIENCE
from tests.contract.whole_models import ALL_ARCHITECTURES

SIGNAL = {"basis": 6, "widths": [0.1, 0.2], "samples": 5}

ALL_CASES = [
    Case("local_attention", "chunk", core=False),
    Case("local_attention", "short_block", {"block": 4}, core=False),
    Case("local_attention", "grouped", {"block": 4}, queries_per_key=2),
    Case("local_attention", "qk_norm", {"block": 4}, queries_per_key=2, shape=QK_NORM, core=False),
    Case("full_attention", "unbounded", core=False),
    Case("full_attention", "qk_norm", queries_per_key=2, shape=QK_NORM),
    Case("full_attention", "projection_norm", queries_per_key=2, shape=PROJECTION_NORM),
    Case("full_attention", "bounded", {"max_chunks": 2}, core=False),
    Case("full_attention", "bounded_grouped", {"max_chunks": 1}, queries_per_key=2, core=False),
    Case("transformer_xl", "chunk", core=False),
    Case("transformer_xl", "no_memory", {"memory_length": 0}, core=False),
    Case("transformer_xl", "short_memory", {"memory_length": 5}, queries_per_key=2),
    Case("transformer_xl", "long_memory", {"memory_length": 19, "clamp_length": 9}, core=False),
    Case("transformer_xl", "same_length", {"memory_length": 10, "same_length": True}, core=False),
    Case("transformer_xl", "qk_norm", {"memory_length": 11}, queries_per_key=2, shape=QK_NORM, core=False),
    Case("compressive_transformer", "convolution", {"compressed_length": 5}, queries_per_key=2),
    Case("compressive_transformer", "dilated", {"memory_length": 16, "compression": "dilated"}, core=False),
    Case("compressive_transformer", "mean", {"compression": "mean", "ratio": 2, "clamp_length": 11}, core=False),
    Case("compressive_transformer", "max", {"compression": "max", "compressed_length": 3}, core=False),
    Case("compressive_transformer", "most_used", {"compression": "most_used", "ratio": 2}, core=False),
    Case("compressive_transformer", "qk_norm", {"reconstruction_weight": 0.5}, shape=QK_NORM, core=False),
    Case("infinity_former", "local", {**SIGNAL, "kl_weight": 0.1}, queries_per_key=2),
    Case(
        "infinity_former",
        "short_memory",
        {**SIGNAL, "short_memory": 8, "tau": 0.7, "restart_after": 16, "padding": "zeros"},
        core=False,
    ),
    Case("infinity_former", "sticky", {**SIGNAL, "short_memory": 8, "sticky": "random", "bins": 9}, queries_per_key=2),
    Case(
        "infinity_former",
        "sticky_local",
        {**SIGNAL, "sticky": "spread", "bin_place": 0.0, "gate_init": 0.4, "kl_mean": 0.3},
        core=False,
    ),
    Case("infinity_former", "qk_norm", SIGNAL, shape=QK_NORM, core=False),
    Case("infini_attention", "delta", core=False),
    Case("infini_attention", "qk_norm", {"block": 4}, queries_per_key=2, shape=QK_NORM, core=False),
    Case("infini_attention", "linear", {"update": "linear", "gate_init": 1.0}, core=False),
    Case("infini_attention", "short_block", {"block": 4, "gate_init": -0.5}, core=False),
    Case("infini_attention", "grouped", {"block": 4}, queries_per_key=2),
    Case("infini_attention", "plain_read", {"update": "linear", "normalize": False}, queries_per_key=2, core=False),
    Case("infini_attention", "plain_delta", {"block": 4, "normalize": False}, core=False),
    Case("infini_attention", "stopped", {"block": 4, "stop_gradient": True}, core=False),
    Case("elastic_memory", "exponential", {"order": 6, "samples": 5}, core=False),
    Case("elastic_memory", "qk_norm", {"order": 6, "block": 4}, queries_per_key=2, shape=QK_NORM, core=False),
    Case("elastic_memory", "projection_norm", {"order": 6, "block": 4}, 2, shape=PROJECTION_NORM, core=False),
    Case(
        "elastic_memory",
        "uniform",
        {"order": 8, "sampling": "uniform", "block": 4, "sample_offset": 0.5},
        core=False,
    ),
    Case("elastic_memory", "grouped", {"order": 5, "block": 4, "alpha": 0.6}, queries_per_key=2),
    Case(
        "elastic_memory",
        "custom_points",
        {"order": 7, "sampling": "custom", "points": [0.9, 0.2, 1.0], "discretization": "bilinear", "block": 4},
        core=False,
    ),
    Case("elastic_memory", "backward", {"order": 5, "discretization": "backward"}, queries_per_key=2, core=False),
    Case("elastic_memory", "forward", {"order": 4, "discretization": "forward"}, core=False),
    Case("elastic_memory", "from_one", {"order": 6, "block": 4, "first_token": 1}, queries_per_key=2, core=False),
    Case(
        "elastic_memory",
        "from_one_bilinear",
        {"order": 5, "sampling": "uniform", "sample_offset": 0.5, "discretization": "bilinear", "first_token": 1},
        core=False,
    ),
    Case("memorizing_attention", "gated", {"queue": 16, "gate_init": 0.7}, core=False),
    Case("memorizing_attention", "qk_norm", {"queue": 11, "block": 4}, queries_per_key=2, shape=QK_NORM, core=False),
    Case("memorizing_attention", "short_queue", {"queue": 5, "gate_init": -0.4}, core=False),
    Case("memorizing_attention", "short_block", {"queue": 11, "block": 4, "gate_init": 0.5}, queries_per_key=2),
    Case("memorizing_attention", "joint", {"queue": 13, "gate": "none"}, queries_per_key=2, core=False),
    Case(
        "memorizing_attention",
        "joint_normalized",
        {"queue": 12, "gate": "none", "block": 4, "normalize_keys": True, "stop_gradient": True},
        core=False,
    ),
    Case("memorizing_attention", "normalized", {"queue": 10, "normalize_keys": True}, queries_per_key=2, core=False),
    Case("memorizing_attention", "nearest", {"queue": 14, "block": 4, "retrieval": "topk", "top_k": 5}, core=False),
    Case(
        "memorizing_attention",
        "joint_nearest",
        {"queue": 12, "retrieval": "topk", "top_k": 3, "gate": "none"},
        queries_per_key=2,
        core=False,
    ),
    Case("memorizing_attention", "stopped", {"queue": 16, "stop_gradient": True}, core=False),
    Case(
        "memorizing_attention",
        "original",
        {"queue": 10, "block": 4, "retrieval": "topk", "top_k": 4, "normalize_keys": True, "stop_gradient": True},
        core=False,
    ),
    Case("memorizing_attention", "window", {"queue": 13, "window": 11, "gate_init": 0.4}, core=False),
    Case(
        "memorizing_attention",
        "window_nearest",
        {"queue": 14, "block": 4, "window": 7, "retrieval": "topk", "top_k": 5, "normalize_keys": True},
        queries_per_key=2,
        core=False,
    ),
    Case(
        "memorizing_attention",
        "window_stopped",
        {"queue": 9, "block": 4, "window": 10, "stop_gradient": True},
        shape=QK_NORM,
        core=False,
    ),
    Case("memorizing_attention", "window_joint", {"queue": 19, "block": 4, "window": 9, "gate": "none"}, core=False),
    Case(
        "memorizing_attention",
        "window_joint_nearest",
        {"queue": 17, "window": 8, "gate": "none", "retrieval": "topk", "top_k": 3},
        queries_per_key=2,
        core=False,
    ),
    Case("melodi", "short_block", {"summaries": 2, "block": 4}, core=False),
    Case("melodi", "chunk", {"summaries": 3}, core=False),
    Case(
        "melodi",
        "qk_norm",
        {"summaries": 2, "block": 4, "long_memory": 7, "long_increment": 2},
        queries_per_key=2,
        shape=QK_NORM,
        core=False,
    ),
    Case("melodi", "grouped", {"summaries": 4}, queries_per_key=2, core=False),
    Case(
        "melodi",
        "long",
        {"summaries": 2, "block": 4, "long_memory": 7, "long_increment": 2, "gate_init": -1.0},
        queries_per_key=2,
    ),
    Case("linear_attention", "plain", core=False),
    Case("linear_attention", "normalized", {"features": "elu", "normalizer": True, "expand_v": 2}, core=False),
    Case("linear_attention", "positive", {"features": "elu", "convolution": 1, "output_gate": False}, core=False),
    Case(
        "linear_attention",
        "grouped",
        {"convolution": 3, "inner_chunk": 3, "expand_v": 2},
        queries_per_key=2,
        core=False,
    ),
    Case("retnet", "wide", {"convolution": 3}, core=False),
    Case("retnet", "grouped", {"inner_chunk": 3, "convolution": 2, "expand_v": 1}, queries_per_key=2, core=False),
    Case("delta_net", "plain", core=False),
    Case("delta_net", "wide", {"inner_chunk": 3, "expand_v": 2, "output_gate": False}, core=False),
    Case("delta_net", "gated", {"decay": True, "inner_chunk": 5, "convolution": 2}, queries_per_key=2),
    Case("ssd", "plain", core=False),
    Case("ssd", "grouped", {"inner_chunk": 3, "expand_v": 2}, queries_per_key=2, core=False),
    Case("dla", "plain", {"inner_chunk": 8, "max_rate": 0.01}, core=False),
    Case(
        "dla",
        "matrix",
        {
            "network": "linear",
            "start": "zero",
            "residual": False,
            "layer_norm": False,
            "rate": "fixed",
            "inner_chunk": 2,
        },
        core=False,
    ),
    Case(
        "dla",
        "decay",
        {"decay": True, "inner_chunk": 4, "expansion": 2, "layer_norm": False},
        queries_per_key=2,
        core=False,
    ),
    Case(
        "titans",
        "paper",
        {"inner_chunk": 4, "expansion": 2, "max_rate": 0.05},
        queries_per_key=2,
        shape=FEW_CHANNELS,
        core=False,
    ),
    Case(
        "titans",
        "matrix",
        {"inner_chunk": 8, "network": "linear", "normalize": False, "max_rate": 0.02},
        shape=FEW_CHANNELS,
        core=False,
    ),
    Case(
        "titans",
        "no_momentum",
        {"inner_chunk": 1, "momentum": False, "output_gate": False, "max_rate": 0.1, "layer_norm": False},
        core=False,
    ),
    # steps that nothing takes back let rounding grow: to 1.3e-12 with rates up to 0.05; with 0.02 it stays at 5e-14
    Case(
        "titans",
        "no_decay",
        {"inner_chunk": 2, "decay": False, "residual": False, "max_rate": 0.02},
        shape=FEW_CHANNELS,
        core=False,
    ),
    *CACHING,
    Case(
        "memora",
        "paper",
        {"inner_chunk": 4, "expansion": 2, "max_rate": 0.1, "gate_rank": 2},
        shape=FEW_CHANNELS,
        core=False,
    ),
    Case(
        "memora",
        "exact",
        {
            "inner_chunk": 1,
            "network": "linear",
            "scale": 1.0,
            "max_rate": 0.2,
            "residual": False,
            "layer_norm": False,
        },
        queries_per_key=2,
        core=False,
    ),
    Case(
        "memora",
        "exact_network",
        {"inner_chunk": 1, "expansion": 2, "max_rate": 0.1, "gate_rank": 3, "layer_norm": False},
        core=False,
    ),
    Case(
        "memora",
        "fixed",
        {"inner_chunk": 8, "rate": "fixed", "decay": False, "max_rate": 0.05},
        shape=FEW_CHANNELS,
        core=False,
    ),
    *LOG_LINEAR,
    Case("masked_mixer", "flat", {"kernel_width": 3}),
    Case("masked_mixer", "pointwise", core=False),
    Case("masked_mixer", "long_map", {"map_size": 11, "kernel_width": 2}, core=False),
    Case("masked_mixer", "headed", {"form": "headed"}, queries_per_key=2, core=False),
    Case(
        "masked_mixer",
        "headed_wide",
        {"form": "headed", "map_size": 13, "kernel_width": 3},
        shape={"bias": True, "norm": "layer", "mlp": "gelu"},
        core=False,
    ),
    Case("sliding_attention", "across", {"window": 13}, queries_per_key=2),
    Case("sliding_attention", "qk_norm", {"window": 13}, queries_per_key=2, shape=QK_NORM, core=False),
    Case("sliding_attention", "short", {"window": 3}, core=False),
    Case("sliding_attention", "chunk", core=False),
    Case(
        "sequential",
        "mal",
        {
            "mixers": [
                {"kind": "titans", "inner_chunk": 4, "expansion": 2, "max_rate": 0.05},
                {"kind": "sliding_attention", "window": 6},
            ]
        },
        queries_per_key=2,
        core=False,
    ),
    Case(
        "sequential",
        "melodi",
        {"mixers": [{"kind": "melodi", "summaries": 2, "block": 4}, "full_attention"]},
        core=False,
    ),
    Case(
        "added_memory",
        "delta_net",
        {"memory": {"kind": "delta_net", "decay": True}, "attention": {"kind": "local_attention", "block": 4}},
        queries_per_key=2,
        core=False,
    ),
    Case(
        "added_memory",
        "elastic",
        {"memory": {"kind": "elastic_memory", "order": 5, "samples": 4}, "attention": "sliding_attention"},
        core=False,
    ),
    Case(
        "added_memory",
        "compressive",
        {"memory": {"kind": "compressive_transformer", "compressed_length": 5}},
        core=False,
    ),
]

CHOSEN = os.environ.get("MEGAMEM_CASES", "").split(",")
ALONE = {case.id for case in [*ALL_CASES, *ALL_ARCHITECTURES]}.intersection(CHOSEN)
"""Cases that are named themselves: then no others run."""


def runs(case: Case) -> bool:
    """Whether the laws run on a case."""
    return case.id in ALONE if ALONE else case.core or case.kind in CHOSEN or CHOSEN == ["all"]


CASES = [case for case in ALL_CASES if runs(case)]
ARCHITECTURES = [case for case in ALL_ARCHITECTURES if runs(case)]
PATIENCE_S = PATIENCE * (180 + 20 * (len(CASES) + len(ARCHITECTURES)))
"""What a world that runs all cases gets: the slowest took 970 s for 61 cases on two cores, beside other work."""
