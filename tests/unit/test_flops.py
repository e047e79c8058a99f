"""FLOPs by formula against torch's counter on the model as it runs."""

from __future__ import annotations

import pytest

from megamem.config.cost import Flops
from megamem.config.model import ModelConfig
from megamem.costs.flops import flop_costs, flops_by_part, flops_per_token, layer_chunk_flops, mixing_flops
from megamem.model.stage import meta_stage
from megamem.pipeline.freezing import what_learns
from tests.unit.counted_flops import CHUNK, CHUNKS, ROWS, counted, small_model

ZEROS = {"network": "linear", "start": "zero", "layer_norm": False}
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
    "memorizing, window": {"kind": "memorizing_attention", "queue": 100, "block": 32, "window": 50},
    "memorizing, both": {"kind": "memorizing_attention", "queue": 90, "window": 91, "retrieval": "topk", "top_k": 9},
    "memorizing, window, joint": {"kind": "memorizing_attention", "queue": 120, "window": 80, "gate": "none"},
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
    "dla, matrix": {**ZEROS, "kind": "dla", "inner_chunk": 32, "rate": "fixed"},
    "titans": {"kind": "titans", "inner_chunk": 32},
    "titans, matrix of zeros": {**ZEROS, "kind": "titans", "inner_chunk": 16},
    "titans, matrix": {"kind": "titans", "network": "linear", "decay": False},
    "dla without norm": {"kind": "dla", "inner_chunk": 16, "layer_norm": False},
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
    "caching, logarithmic": {"kind": "memory_caching", "memory": {"kind": "titans", "inner_chunk": 16}, "segment": 16}
    | {"lengths": "logarithmic", "levels": 3},
    "caching, normalized": {"kind": "memory_caching", "segment": 32}
    | {"memory": {"kind": "linear_attention", "inner_chunk": 16, "features": "elu", "normalizer": True}},
    "memora": {"kind": "memora", "inner_chunk": 16, "gate_rank": 3},
    "memora, matrix": {"kind": "memora", "inner_chunk": 32, "network": "linear"},
    "log-linear": {"kind": "log_linear", "memory": {"kind": "linear_attention", "inner_chunk": 16}, "segment": 32},
    "log-linear, titans": {
        "kind": "log_linear",
        "memory": {"kind": "titans", "inner_chunk": 16},
        "segment": 16,
        "levels": 3,
    },
    "masked mixer": {"kind": "masked_mixer"},
    "masked mixer, headed": {"kind": "masked_mixer", "form": "headed", "kernel_width": 3, "map_size": 70},
    "sliding": {"kind": "sliding_attention", "window": 100},
    "sliding, short": {"kind": "sliding_attention", "window": 24},
    "mal": {"kind": "sequential", "mixers": ["titans", {"kind": "sliding_attention", "window": 150}]},
    "added memory": {"kind": "added_memory", "memory": {"kind": "elastic_memory", "order": 48, "samples": 24}},
    "gated delta net": {"kind": "delta_net", "decay": True, "output_gate": False},
}


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


@pytest.mark.parametrize(
    "architecture",
    [
        {"kind": "recurrent_memory", "memory_tokens": 3},
        {"kind": "memory_model", "encoder": {"layers": 1}, "slots": CHUNKS - 1},
        {
            "kind": "memory_model",
            "encoder": {"layers": 2, "hidden_size": 48, "heads": 3, "kv_heads": 3, "mixer": {"kind": "retnet"}},
            "slots": 5,
            "memories_per_chunk": 2,
            "compressed_size": 7,
        },
        {"kind": "memory_model", "slots": 3},
        {"kind": "memory_model", "slots": 3, "positions": "variable"},
        {
            "kind": "memory_model",
            "encoder": {"layers": 2, "hidden_size": 48, "heads": 3},
            "slots": 5,
            "memories_per_chunk": 2,
            "positions": "variable",
        },
        {"kind": "memory_model", "encoder": {"layers": 1}, "slots": CHUNKS + 3, "positions": "variable"},
    ],
    ids=str,
)
def test_formula_agrees_with_the_counter_for_whole_models(architecture: dict[str, object]) -> None:
    """Layers of other widths, rows in front of each chunk's tokens, projections of memories.

    The last memories of a sequence are read by nobody, so that their backward pass is not counted: the whole encoder's,
    of one chunk of 8.
    """
    model = small_model("local_attention", layers=4, architecture=architecture)
    parts = flops_by_part(model, CHUNKS * CHUNK, causal=False)
    forward, backward = counted(model)
    assert sum(part.forward for part in parts.values()) == pytest.approx(forward, rel=1e-9)
    encoder = range(getattr(model.architecture, "encoder_layers", 0))
    unread = sum(encoder_backward(model, layer) for layer in encoder) / CHUNKS
    assert sum(part.backward for part in parts.values()) - unread == pytest.approx(backward, rel=1e-9)
    # by layer and by chunk as of the whole model
    length, whole = CHUNKS * CHUNK, flops_per_token(model, CHUNKS * CHUNK)
    costs = flop_costs(model, length)
    assert sum(costs.layers) + costs.head == pytest.approx(whole["training"], rel=1e-12)
    chunks = [layer_chunk_flops(model, layer, CHUNKS) for layer in range(model.layers)]
    assert [sum(flops.total for flops in layer) / CHUNKS for layer in chunks] == pytest.approx(list(costs.layers))


def test_a_chunk_of_a_decoder_costs_more_with_each_memory_that_it_reads() -> None:
    """Three chunks until all slots are full; products with weights alone, and then attention, are what grows."""
    architecture = {"kind": "memory_model", "slots": 3, "positions": "variable", "memories_per_chunk": 2}
    model = small_model("local_attention", layers=2, architecture=architecture)
    chunks = [flops.forward for flops in layer_chunk_flops(model, 0, CHUNKS)]
    rows = [CHUNK + 2 * min(chunk, 3) for chunk in range(CHUNKS)]
    part = model.part(0)
    dense = 2 * (model.mlp_matrices + part.mixer.projection_parameters(model))
    pairs = 4 * model.heads * model.resolved_head_dim
    expected = [(n * dense + pairs * n * (n + 1) / 2) / CHUNK for n in rows]
    assert chunks == pytest.approx(expected, rel=1e-12)


def encoder_backward(model: ModelConfig, layer: int) -> float:
    """Backward FLOPs per token of an encoder's layer, whole rectangles of attention counted."""
    inside = model.layer_model(layer)
    dense = 4.0 * (inside.mlp_matrices + model.mixer_at(layer).projection_parameters(inside))
    return dense + sum(flops.backward for flops in mixing_flops(model, layer, CHUNK, causal=False).values())


def added(model: ModelConfig) -> set[str]:
    """The parameters that the same model without memories has not."""
    plain = model.model_copy(update={"mixer": small_model("local_attention").mixer, "memory": ()})
    whole, before = (dict(meta_stage(each).named_parameters()) for each in (model, plain))
    return set(whole) - set(before)


MEMORY = MIXERS["infinity-former"]


@pytest.mark.parametrize("mixer", [MEMORY, MIXERS["infini"], MIXERS["memorizing"], MIXERS["memorizing, stopped"]])
@pytest.mark.parametrize("layers", [[0, 2], [0, 1, 2]])
def test_frozen_parameters_have_no_gradients_to_count(mixer: dict[str, object], layers: list[int]) -> None:
    """Above the lowest layer that learns, to the last operation: a gradient enters it here, as the formula supposes."""
    model = small_model("local_attention", layers=3, memory=[{"layers": layers, "mixer": mixer}])
    learning = what_learns(model, added(model))
    assert all(map(learning.backward.reaches, range(3)))
    assert set(learning.backward.layer_matrices) == {0}
    parts = flops_by_part(model, CHUNKS * CHUNK, causal=False, backward=learning.backward)
    forward, backward = counted(model, learning.names, gradient_enters=True)
    assert sum(part.forward for part in parts.values()) == pytest.approx(forward, rel=1e-9)
    assert sum(part.backward for part in parts.values()) == pytest.approx(backward, rel=1e-9)


@pytest.mark.parametrize("name", ["transformer-xl", "melodi", "melodi, rising"])
def test_what_projects_again_with_the_base_counts_as_if_it_learned(name: str) -> None:
    """A mixer that reads its memory through frozen projections once more: never less than what is computed."""
    model = small_model(MIXERS[name], layers=2)
    learning = what_learns(model, added(model))
    backward = sum(p.backward for p in flops_by_part(model, CHUNKS * CHUNK, False, learning.backward).values())
    everything = sum(p.backward for p in flops_by_part(model, CHUNKS * CHUNK, causal=False).values())
    _, found = counted(model, learning.names)
    assert found < backward < everything


def test_matrices_of_the_base_that_learn_are_counted() -> None:
    model = small_model("local_attention", layers=2)
    whole = {name for name, _ in meta_stage(model).named_parameters()}
    names = {name for name in whole if name.startswith(("layers.0.mlp.", "layers.1.mixer.", "head."))}
    learning = what_learns(model, names)
    parts = flops_by_part(model, CHUNKS * CHUNK, causal=False, backward=learning.backward)
    _, backward = counted(model, names, gradient_enters=True)
    assert sum(part.backward for part in parts.values()) == pytest.approx(backward, rel=1e-9)
    everything = flops_per_token(model, CHUNKS * CHUNK)
    assert flops_per_token(model, CHUNKS * CHUNK, what_learns(model, whole).backward) == everything


@pytest.mark.parametrize("mixer", [MEMORY, MIXERS["infini"]])
def test_layers_below_the_lowest_that_learns_have_no_backward_pass(mixer: dict[str, object]) -> None:
    """Not more than what the formula takes for granted in that layer: gradients of its input, and attention's."""
    model = small_model("local_attention", layers=4, memory=[{"layers": [2, 3], "mixer": mixer}])
    learning = what_learns(model, added(model))
    assert [learning.backward.reaches(layer) for layer in range(4)] == [False, False, True, True]
    assert [learning.reaches_input(layer) for layer in range(5)] == [False, False, False, True, True]
    length = CHUNKS * CHUNK
    backward = sum(part.backward for part in flops_by_part(model, length, False, learning.backward).values())
    own = sum(flops.backward for flops in mixing_flops(model, 2, length, causal=False).values())
    projections = 2 * model.mixer_at(2).projection_parameters(model)
    _, found = counted(model, learning.names)
    assert 0 < backward - found < own + projections
    # by layer, by chunk and of the whole model the same
    costs = flop_costs(model, length, learning.backward)
    whole = flops_per_token(model, length, learning.backward)
    assert sum(costs.layers) + costs.head == pytest.approx(whole["training"])
    chunks = [layer_chunk_flops(model, layer, CHUNKS, learning.backward) for layer in range(4)]
    assert [flops.backward for layer in chunks[:2] for flops in layer] == [0.0] * 2 * CHUNKS
    assert [sum(flops.total for flops in layer) / CHUNKS for layer in chunks] == pytest.approx(list(costs.layers))


WRITER = "layers.1.writer.projections."


@pytest.mark.parametrize("frozen", ["encoder", "decoder", "all but the projections"])
def test_frozen_parts_are_counted_as_they_are_computed(frozen: str) -> None:
    """A frozen encoder has no backward pass but for its projections; gradients go through a frozen decoder."""
    encoder = {"layers": 2, "hidden_size": 48, "heads": 3, "kv_heads": 3}
    architecture = {"kind": "memory_model", "encoder": encoder, "slots": 3, "compressed_size": 7}
    model = small_model("local_attention", layers=4, architecture=architecture)
    names = {name for name, _ in meta_stage(model).named_parameters()}
    part = model.architecture.parts(model).get(frozen)
    learn = {name for name in names if (part.plain_name(name) is None if part else name.startswith(WRITER))}
    backward_pass = what_learns(model, learn).backward
    assert [backward_pass.reaches(layer) for layer in range(4)] == [frozen == "decoder"] * 2 + [True] * 2
    assert backward_pass.entered == (frozen == "decoder",) * 2 + (True,) * 3
    assert backward_pass.extra[1] == (1.0 if frozen == "decoder" else 0.5)
    parts = flops_by_part(model, CHUNKS * CHUNK, False, backward_pass)
    backward = sum(flops.backward for flops in parts.values())
    _, found = counted(model, learn)
    projections = parts["memory_projection"]
    exact = projections.backward
    if frozen != "decoder":
        # a gradient for each of the three matrices, and all but the lowest hand one on; counted is the former
        assert projections.backward == projections.forward
        exact += projections.forward - 2 * 48 * 7 / CHUNK
    # nobody reads the last memories of a sequence, and the first chunk reads none that could learn
    missing = exact if frozen == "encoder" else backward - projections.backward + exact
    assert backward - projections.backward + exact - missing / CHUNKS == pytest.approx(found, rel=1e-9)
    # by layer and of the whole model the same
    costs, whole = (cost(model, CHUNKS * CHUNK, backward_pass) for cost in (flop_costs, flops_per_token))
    assert sum(costs.layers) + costs.head == pytest.approx(whole["training"])


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
