"""FLOPs of log-linear attention by formula against torch's counter, as `test_flops.py` does of every mixer."""

from __future__ import annotations

import pytest

from megamem.costs.flops import flops_by_part
from tests.unit.counted_flops import CHUNK, CHUNKS, counted, small_model

GATED_DELTA_NET = {"kind": "delta_net", "decay": True, "inner_chunk": 16, "expand_v": 2}
FORMS = {
    "dla that fades": {"memory": {"kind": "dla", "inner_chunk": 16, "decay": True}, "segment": 16, "closed": "faded"},
    "retnet, strong": {"memory": {"kind": "retnet", "inner_chunk": 16}, "segment": 32, "admissibility": "strong"},
    "ssd that fades": {"memory": {"kind": "ssd", "inner_chunk": 16}, "segment": 1, "closed": "faded"},
    "gated delta net that fades": {"memory": GATED_DELTA_NET, "segment": 1, "closed": "faded", "levels": 7},
    "delta net that fades, strong": {
        "memory": {"kind": "delta_net", "inner_chunk": 16},
        "segment": 32,
        "levels": 3,
        "closed": "faded",
        "admissibility": "strong",
    },
}


@pytest.mark.parametrize("name", FORMS)
def test_formula_agrees_with_the_counter(name: str) -> None:
    model = small_model({"kind": "log_linear", **FORMS[name]}, kv_heads=2)
    # whole rectangles are computed
    parts = flops_by_part(model, CHUNKS * CHUNK, causal=False)
    forward, backward = counted(model)
    assert sum(part.forward for part in parts.values()) == pytest.approx(forward, rel=1e-9)
    assert sum(part.backward for part in parts.values()) == pytest.approx(backward, rel=1e-9)


@pytest.mark.parametrize("admissibility", ["weak", "strong"])
def test_transitions_of_kept_levels_count_at_least_what_is_computed(admissibility: str) -> None:
    """Forward exactly; backward with those products that no later segment needs."""
    memory = {"kind": "delta_net", "inner_chunk": 16, "expand_v": 2}
    mixer = {"kind": "log_linear", "memory": memory, "segment": 32, "levels": 3, "admissibility": admissibility}
    model = small_model(mixer, kv_heads=2)
    parts = flops_by_part(model, CHUNKS * CHUNK, causal=False)
    forward, backward = counted(model)
    assert sum(part.forward for part in parts.values()) == pytest.approx(forward, rel=1e-9)
    assert backward <= sum(part.backward for part in parts.values()) < 1.1 * backward
