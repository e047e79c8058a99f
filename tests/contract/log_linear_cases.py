"""Small configurations of log-linear attention: each memory, both ways of closed levels, both admissibilities."""

from __future__ import annotations

from typing import Any

from tests.contract.case import FEW_CHANNELS, Case

TITANS = {"kind": "titans", "inner_chunk": 2, "max_rate": 0.02, "layer_norm": False}
DLA = {"kind": "dla", "network": "linear", "max_rate": 0.1}
GATED = {"kind": "delta_net", "decay": True, "expand_v": 2}
"""Values of 8 channels: among outputs of 4 some nearly vanish, whose norm makes rounding grow."""
STRONG = {"admissibility": "strong"}
FADED = {"closed": "faded"}


def log_linear(name: str, memory: dict[str, Any], segment: int, levels: int, **more: Any) -> Case:
    """A case of log-linear attention, of which only the published mechanism over Gated DeltaNet is core.

    more: further options of the mixer, and `queries_per_key`, `shape` and `init_std` of the case.
    """
    of_case = {key: more.pop(key) for key in ("queries_per_key", "shape", "init_std") if key in more}
    options = {"memory": memory, "segment": segment, "levels": levels, **more}
    return Case("log_linear", name, options, core=name == "faded_gated_delta_net", **of_case)


LOG_LINEAR = [
    log_linear("tokens", {"kind": "linear_attention"}, 1, 4),
    log_linear("normalized", {"kind": "linear_attention", "features": "elu", "normalizer": True}, 2, 3),
    log_linear("titans", TITANS, 2, 3, queries_per_key=2),
    log_linear("dla", {**DLA, "inner_chunk": 4}, 4, 1, shape=FEW_CHANNELS),
    log_linear("retnet", {"kind": "retnet", "expand_v": 1}, 2, 3),
    log_linear("ssd_strong", {"kind": "ssd"}, 2, 4, **STRONG),
    log_linear("delta_net", {"kind": "delta_net", "expand_v": 2, "inner_chunk": 3}, 4, 3),
    log_linear("gated_delta_net_strong", GATED, 1, 5, **STRONG, queries_per_key=2),
    log_linear("titans_strong", TITANS, 2, 4, **STRONG, queries_per_key=2),
    log_linear("faded_linear", {"kind": "linear_attention", "inner_chunk": 4}, 1, 3, **FADED),
    log_linear("faded_retnet", {"kind": "retnet", "inner_chunk": 5}, 2, 4, **FADED, **STRONG, queries_per_key=2),
    log_linear("faded_ssd", {"kind": "ssd", "inner_chunk": 8}, 1, 6, **FADED),
    log_linear("faded_delta_net", {"kind": "delta_net", "inner_chunk": 3}, 4, 2, **FADED),
    # with weights of 0.3 one unit of float64 in the last place of them moves gradients of four layers by up to 6e-12,
    # which no order of sums escapes; with 0.1 by 5e-14: there the laws' 1e-12 tells faults from rounding
    log_linear("faded_gated_delta_net", GATED, 1, 4, **FADED, queries_per_key=2, init_std=0.1),
    log_linear("faded_gated_delta_net_strong", {**GATED, "inner_chunk": 3}, 1, 5, **FADED, **STRONG),
    log_linear("faded_titans", TITANS, 2, 3, **FADED, queries_per_key=2),
    log_linear(
        "faded_dla_strong", {**DLA, "decay": True, "inner_chunk": 2}, 2, 4, **FADED, **STRONG, shape=FEW_CHANNELS
    ),
]
