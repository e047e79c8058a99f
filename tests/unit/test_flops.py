"""FLOPs by formula against torch's counter on the model as it runs."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megamem.config.cost import Flops
from megamem.config.load import parse_config
from megamem.config.model import ModelConfig
from megamem.costs.flops import flops_by_part, flops_per_token
from megamem.memory.base import Chunk
from megamem.model.stage import build_stage
from megamem.parallel.linears import PlainLinears, initialize_parameters

CHUNK, CHUNKS, ROWS = 64, 8, 2
MIXERS = {
    "local attention": {"kind": "local_attention"},
    "local attention in blocks": {"kind": "local_attention", "block": 16},
    "full attention": {"kind": "full_attention"},
    "full attention, bounded": {"kind": "full_attention", "max_chunks": 3},
    "transformer-xl": {"kind": "transformer_xl", "memory_length": 100},
    "transformer-xl, same length": {"kind": "transformer_xl", "same_length": True},
    "lamemo": {"kind": "lamemo"},
    "lamemo, short memory, signed": {"kind": "lamemo", "memory_length": 40, "positions": "transformer_xl"},
    "lamemo, long memory, unordered": {"kind": "lamemo", "memory_length": 100, "order_mask": False},
    "lamemo, without look-ahead": {"kind": "lamemo", "memory_length": 100, "look_ahead": False},
    "compressive": {"kind": "compressive_transformer", "memory_length": 128, "compressed_length": 40},
    "compressive, mean": {"kind": "compressive_transformer", "compression": "mean"},
    "infinity-former": {"kind": "infinity_former", "basis": 24, "samples": 20, "widths": [0.05, 0.1]},
    "infinity-former, short memory, begun again": {
        "kind": "infinity_former",
        "basis": 30,
        "samples": 20,
        "widths": [0.05, 0.1],
        "short_memory": 64,
        "restart_after": 128,
    },
    "infinity-former, sticky": {"kind": "infinity_former", "basis": 24, "samples": 20, "sticky": "spread"},
    "infini": {"kind": "infini_attention"},
    "infini, linear": {"kind": "infini_attention", "update": "linear", "block": 32},
    "infini, in blocks, stopped": {"kind": "infini_attention", "block": 16, "stop_gradient": True},
    "infini, stopped": {"kind": "infini_attention", "stop_gradient": True},
    "elastic memory": {"kind": "elastic_memory", "order": 48, "samples": 24},
    "elastic memory in blocks": {"kind": "elastic_memory", "order": 48, "block": 32},
    "memorizing": {"kind": "memorizing_attention", "queue": 100},
    "memorizing, stopped": {"kind": "memorizing_attention", "queue": 24, "block": 32, "stop_gradient": True},
    "memorizing, nearest": {"kind": "memorizing_attention", "queue": 90, "retrieval": "topk", "top_k": 70},
    "memorizing, joint": {"kind": "memorizing_attention", "queue": 80, "gate": "none", "normalize_keys": True},
    "melodi": {"kind": "melodi", "summaries": 12},
    "melodi in blocks": {"kind": "melodi", "summaries": 5, "block": 32},
    "melodi, long memory": {"kind": "melodi", "summaries": 6, "block": 32, "long_memory": 7, "long_increment": 4},
    "melodi, rising": {"kind": "melodi", "form": "rising", "summaries": 12, "memories": 5},
    "melodi, rising, long memory": {
        "kind": "melodi",
        "form": "rising",
        "summaries": 6,
        "long_memory": 7,
        "long_increment": 4,
    },
    "linear attention": {"kind": "linear_attention", "inner_chunk": 16},
    "retnet": {"kind": "retnet", "inner_chunk": 32},
    "delta net": {"kind": "delta_net", "inner_chunk": 16, "expand_v": 2},
    "ssd": {"kind": "ssd", "inner_chunk": 16},
    "dla": {"kind": "dla", "inner_chunk": 16},
    "dla, matrix": {"kind": "dla", "inner_chunk": 32, "network": "linear", "start": "zero", "rate": "fixed"},
    "titans": {"kind": "titans", "inner_chunk": 32},
    "titans, matrix of zeros": {"kind": "titans", "network": "linear", "start": "zero", "inner_chunk": 16},
    "titans, matrix": {"kind": "titans", "network": "linear", "decay": False},
    "caching": {"kind": "memory_caching", "memory": {"kind": "linear_attention", "inner_chunk": 16}, "segment": 32},
    "caching, titans": {"kind": "memory_caching", "memory": {"kind": "titans", "inner_chunk": 16}, "segment": 32},
    "caching, soup": {
        "kind": "memory_caching",
        "memory": {"kind": "titans", "inner_chunk": 16},
        "segment": 32,
        "combine": "soup",
    },
    "caching, continued": {
        "kind": "memory_caching",
        "memory": {"kind": "delta_net", "inner_chunk": 16},
        "segment": 16,
        "write": "continued",
        "combine": "residual",
        "max_chunks": 2,
    },
    "memora": {"kind": "memora", "inner_chunk": 16, "gate_rank": 3},
    "memora, matrix": {"kind": "memora", "inner_chunk": 32, "network": "linear"},
    "log-linear": {"kind": "log_linear", "memory": {"kind": "linear_attention", "inner_chunk": 16}, "segment": 32},
    "log-linear, titans": {
        "kind": "log_linear",
        "memory": {"kind": "titans", "inner_chunk": 16},
        "segment": 16,
        "levels": 3,
    },
    "sliding": {"kind": "sliding_attention", "window": 100},
    "sliding, short": {"kind": "sliding_attention", "window": 24},
    "mal": {"kind": "sequential", "mixers": ["titans", {"kind": "sliding_attention", "window": 150}]},
    "gated delta net": {"kind": "delta_net", "decay": True, "output_gate": False},
}


def triangular_solve(left: tuple[int, ...], right: tuple[int, ...], *_: object, **__: object) -> int:
    """A multiplication and an addition for each entry below the diagonal, rounded up to the square's half."""
    return math.prod(right) * right[-2]


SOLVES = {torch.ops.aten.linalg_solve_triangular: triangular_solve}


def small_model(mixer: dict[str, object], kv_heads: int = 4) -> ModelConfig:
    tree = {
        "layers": 2, "hidden_size": 64, "heads": 4, "kv_heads": kv_heads, "vocab_size": 96, "chunk_size": CHUNK,
        "mixer": mixer, "attention_kernel": "eager",
    }  # fmt: skip
    return parse_config(ModelConfig, tree, "test")


def counted(model: ModelConfig) -> tuple[float, float]:
    """Forward and backward FLOPs per token, counted while a sequence of all chunks runs as one window."""
    stage = build_stage(model, PlainLinears())
    initialize_parameters(stage, seed=0)
    tokens = torch.randint(model.vocab_size, (CHUNKS * CHUNK, ROWS))
    states = stage.initial_states(ROWS, torch.device("cpu"), torch.float32)
    losses = []
    # tables that are computed once, in the first call
    stage(tokens[:CHUNK], states, Chunk((0,) * ROWS))
    with FlopCounterMode(display=False, custom_mapping=SOLVES) as forward:
        for c in range(CHUNKS):
            part = tokens[c * CHUNK : (c + 1) * CHUNK]
            hidden, states, auxiliary = stage(part, states, Chunk((c * CHUNK,) * ROWS))
            losses += [stage.token_losses(hidden, part).sum(), *auxiliary.values()]
    with FlopCounterMode(display=False, custom_mapping=SOLVES) as backward:
        torch.stack(losses).sum().backward()
    return forward.get_total_flops() / tokens.numel(), backward.get_total_flops() / tokens.numel()


@pytest.mark.parametrize(
    ("name", "kv_heads"), [*((name, 2) for name in MIXERS), *((name, 4) for name in ("infini", "melodi", "titans"))]
)
def test_formula_agrees_with_the_counter(name: str, kv_heads: int) -> None:
    model = small_model(MIXERS[name], kv_heads)
    # eager attention computes whole rectangles; all else is equal
    parts = flops_by_part(model, CHUNKS * CHUNK, causal=False)
    # made once for all rows, and counted for one
    if shared := parts.pop("distance_projection", None):
        parts["distance_projection"] = Flops(shared.forward / ROWS, shared.backward / ROWS)
    forward, backward = counted(model)
    assert sum(part.forward for part in parts.values()) == pytest.approx(forward, rel=1e-9)
    assert sum(part.backward for part in parts.values()) == pytest.approx(backward, rel=1e-9)


def test_every_registered_mixer_is_compared() -> None:
    from megamem.config.model import MIXERS as REGISTRY

    ours = {kind for kind, config in REGISTRY.kinds().items() if config.__module__.startswith("megamem.")}
    assert ours == {mixer["kind"] for mixer in MIXERS.values()}


def test_causal_attention_counts_the_triangle() -> None:
    model = small_model({"kind": "local_attention"})
    triangle = flops_by_part(model, CHUNK, causal=True)["attention"].forward
    rectangle = flops_by_part(model, CHUNK, causal=False)["attention"].forward
    # query i of 64 sees i + 1 keys: 32.5 of 64 on average
    assert triangle / rectangle == pytest.approx(65 / 128)


def test_full_attention_over_a_sequence_is_one_triangle() -> None:
    model = small_model({"kind": "full_attention"})
    length = CHUNKS * CHUNK
    expected = model.layers * 4 * model.heads * model.resolved_head_dim * (length + 1) / 2
    assert flops_per_token(model, length)["attention"] == pytest.approx(expected)


def test_totals() -> None:
    flops = flops_per_token(small_model({"kind": "elastic_memory", "order": 48}), CHUNKS * CHUNK)
    parts = {k: v for k, v in flops.items() if k not in ("total", "backward", "training")}
    assert set(parts) == {
        "projections", "mlp", "head", "attention", "memory_attention", "memory_update", "memory_retrieval",
    }  # fmt: skip
    assert flops["total"] == pytest.approx(sum(parts.values()))
    learned = sum(parts[name] for name in ("projections", "mlp", "head", "attention", "memory_attention"))
    constant = parts["memory_update"] + parts["memory_retrieval"]
    # products with a constant matrix hand on one gradient, and not even that at both ends of the sequence
    assert 2 * learned < flops["backward"] < 2 * learned + constant
    assert flops["training"] == pytest.approx(flops["total"] + flops["backward"])


def test_memory_off_costs_nothing_in_one_block() -> None:
    """A sequence of a single block has nothing to recall; only the update of the state remains."""
    flops = flops_per_token(small_model({"kind": "elastic_memory", "order": 48}), CHUNK)
    assert flops["memory_attention"] == flops["memory_retrieval"] == 0
