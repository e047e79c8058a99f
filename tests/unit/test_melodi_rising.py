"""Melodi's rising summaries: side rows, who may take them, what they cost, what passes them by."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import megamem
from megamem.config.load import parse_config
from megamem.config.model import ModelConfig
from megamem.costs.flops import flops_by_part
from megamem.costs.parameters import parameter_counts
from megamem.costs.state_bytes import model_state_bytes
from megamem.errors import ConfigError
from megamem.memory.base import Chunk, state_tensors
from megamem.model.stage import Stage, build_stage
from megamem.parallel.linears import PlainLinears, initialize_parameters
from tests.unit.test_model_config import parameters

CPU, CHUNK, SUMMARIES = torch.device("cpu"), 8, 3
RISING = {"kind": "melodi", "form": "rising", "summaries": SUMMARIES}


def model(mixer: object = RISING, layers: int = 3, **more: Any) -> ModelConfig:
    tree = {
        "layers": layers, "hidden_size": 16, "heads": 4, "vocab_size": 32, "chunk_size": CHUNK, "mixer": mixer,
        "init_std": 0.3, **more,
    }  # fmt: skip
    return parse_config(ModelConfig, tree, "test")


def built(config: ModelConfig, layers: range | None = None) -> Stage:
    stage = build_stage(config, PlainLinears(), layers)
    initialize_parameters(stage, 1)
    return stage.double()


def ids(tokens: int, rows: int = 1) -> torch.Tensor:
    return torch.randint(32, (tokens, rows), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"memory": [{"layers": [1], "mixer": {**RISING, "summaries": 5}}]},
            "layers share one set of side rows, but are given 3 (layer 0) and 5 (layer 1); use one number for all",
        ),
        (
            {"architecture": "recurrent_memory"},
            "architecture recurrent_memory carries no side rows, which melodi (layer 0) takes up the layers; use "
            "architecture decoder",
        ),
        (
            {"mixer": {"kind": "sequential", "mixers": ["local_attention", RISING]}},
            "sequential carries no side rows, which melodi takes up the layers",
        ),
        (
            {"bias": True},
            "model.bias true does not go with form rising: a document's first memory is zeros, whose keys have no "
            "direction; use bias false",
        ),
        ({"mixer": {**RISING, "block": 4}}, "block 4 does not go with form rising: rows rise once per chunk"),
        (
            {"mixer": {"kind": "melodi", "summaries": 3, "memories": 4}},
            "memories 4 other than summaries 3 needs form rising",
        ),
    ],
)
def test_what_side_rows_do_not_go_with_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        model(**{"mixer": RISING, **change})


def test_it_cannot_stand_alone() -> None:
    with pytest.raises(ConfigError, match=r"melodi with these options hands rows from layer to layer.*build_model"):
        megamem.mixer("melodi", hidden_size=16, heads=4, chunk_size=CHUNK, form="rising")


def test_rows_travel_with_the_end_of_a_chunk_only() -> None:
    stage = built(model(), range(1, 3))
    assert stage.border_shape(CHUNK, 2) == (CHUNK + SUMMARIES, 2, 16)
    assert stage.border_shape(5, 2) == (5, 2, 16)
    assert stage.border_shape(3, 2, start=5) == (3 + SUMMARIES, 2, 16)
    with pytest.raises(ValueError, match="9 tokens from place 0 of a chunk of 8 run across its end"):
        stage.border_shape(CHUNK + 1, 2)


def test_rows_at_different_places_are_not_read_in_one_call() -> None:
    stage = built(model())
    states = stage.initial_states(2, CPU, torch.float64)
    with pytest.raises(ValueError, match=re.escape("rows at places [0, 3] of their chunks cannot be read in one call")):
        stage(ids(5, 2), states, Chunk((0, 3)))


def test_two_stages_give_what_one_gives() -> None:
    """What a stage hands up is all that the next one needs: tokens, and rows behind them."""
    config = model({**RISING, "memories": 2})
    whole, lower, upper = built(config), built(config, range(2)), built(config, range(2, 3))
    states = [stage.initial_states(1, CPU, torch.float64) for stage in (whole, lower, upper)]
    x = ids(3 * CHUNK)
    for start in range(0, 3 * CHUNK, CHUNK):
        call, chunk = x[start : start + CHUNK], Chunk((start,))
        expected, states[0], _ = whole(call, states[0], chunk)
        hidden, states[1], _ = lower(call, states[1], chunk)
        assert hidden.shape == lower.border_shape(CHUNK, 1)
        output, states[2], _ = upper(hidden, states[2], chunk)
        # the same operations in the same order
        assert torch.equal(output, expected)


def test_other_layers_let_the_rows_pass_by() -> None:
    """Between a layer that takes them and the next such layer they do not change, nor do they change the others."""
    hybrid = model(memory=[{"layers": [1], "mixer": "local_attention"}])
    stage = built(hybrid, range(3))
    layer = stage.layers["1"]
    hidden = torch.randn(CHUNK + SUMMARIES, 1, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    state = layer.mixer.initial_state(1, CPU, torch.float64)
    output, _, _ = layer(hidden, state, Chunk((0,), rows_behind=SUMMARIES))
    alone, _, _ = layer(hidden[:CHUNK], state, Chunk((0,)))
    assert torch.equal(output[:CHUNK], alone)
    assert torch.equal(output[CHUNK:], hidden[CHUNK:])


def test_a_layer_below_reaches_the_memory_above_through_the_rows() -> None:
    """The learned rows at the bottom have a gradient from every layer's memory."""
    stage = built(model({**RISING, "memories": 2}, memory=[{"layers": [1], "mixer": "local_attention"}]))
    _, states, _ = stage(ids(CHUNK), stage.initial_states(1, CPU, torch.float64), Chunk((0,)))
    for name in ("layers.0", "layers.2"):
        (grad,) = torch.autograd.grad(states[name]["memory"].square().sum(), stage.side_rows.weight, retain_graph=True)
        assert grad.abs().amax(1).min() > 1e-6


def test_no_token_sees_itself_or_a_summary() -> None:
    """The first token of a document sees zeros only: attention puts out nothing, and no gradient comes from its row."""
    stage = built(model(layers=1))
    mixer = stage.layers["0"].mixer
    hidden = torch.randn(CHUNK + SUMMARIES, 1, 16, dtype=torch.float64, requires_grad=True)
    output, _, _ = mixer(hidden, mixer.initial_state(1, CPU, torch.float64), Chunk((0,), rows_behind=SUMMARIES))
    assert output[0].abs().max() == 0.0
    for row in range(1, CHUNK + SUMMARIES):
        (grad,) = torch.autograd.grad(output[row].square().sum(), hidden, retain_graph=True)
        seen = grad.abs().amax((1, 2)) > 0
        # its own row asks the query
        assert seen.tolist() == [i <= row for i in range(CHUNK + SUMMARIES)]
        assert torch.autograd.grad(output[row].sum(), mixer.value.weight, retain_graph=True)[0].abs().max() > 0


@pytest.mark.parametrize(
    ("options", "layers"),
    [({}, 3), ({"memories": 5}, 3), ({"memories": 5, "long_memory": 7, "long_increment": 2}, 2), ({"memories": 1}, 1)],
)
def test_parameters_and_state_by_hand(options: dict[str, int], layers: int) -> None:
    config = model({**RISING, **options}, layers)
    rows, memories = CHUNK + SUMMARIES, options.get("memories", SUMMARIES)
    local = model("local_attention", layers)
    # a scale per head, the memory's norm, M_m and b_m
    layer = 4 + 16 + (rows + 1) * memories
    rising = (rows + 1) * SUMMARIES
    # norms of tokens and summaries, wherever something is mixed from normalized rows
    normed = layers if memories == SUMMARIES else layers - 1
    expected = layers * layer + (layers - 1) * rising + normed * 2 * 16 + SUMMARIES * 16
    if "long_memory" in options:
        # M_e and b_e, and a gate per channel
        expected += layers * ((rows + 1) * 2 + 16)
    assert parameters(config) - parameters(local) == expected
    assert parameter_counts(config)["total"] == parameters(config)
    numbers = memories * 16 + 2 * options.get("long_memory", 0) * 16
    assert model_state_bytes(config, 2, torch.float32)["memory"] == 2 * layers * numbers * 4


def test_rows_count_as_many_tokens_in_every_product() -> None:
    plain, rising = (flops_by_part(model(mixer), 4 * CHUNK) for mixer in ("local_attention", RISING))
    for part in ("projections", "mlp"):
        assert rising[part].forward / plain[part].forward == pytest.approx((CHUNK + SUMMARIES) / CHUNK)
    # M_u in two of three layers, U outputs for each of 11 rows of 16 channels
    assert rising["side_rows"].forward == pytest.approx(2 * 2 * SUMMARIES * 16 * (CHUNK + SUMMARIES) / CHUNK)


def test_left_padding_that_fills_part_of_a_chunk_is_forgotten() -> None:
    """The row's grid begins where its document does: what was written of three padding tokens is gone then."""
    stage = built(model())
    x = ids(3 + 2 * CHUNK)
    states = stage.initial_states(1, CPU, torch.float64)
    _, states, _ = stage(x[:3], states, Chunk((-3,)))
    assert any(tensor.abs().max() > 0 for tensor in state_tensors(states) if tensor.numel())
    fresh = stage.initial_states(1, CPU, torch.float64)
    for start in (0, CHUNK):
        call = x[3 + start : 3 + start + CHUNK]
        output, states, _ = stage(call, states, Chunk((start,)))
        expected, fresh, _ = stage(call, fresh, Chunk((start,)))
        assert torch.equal(output, expected)
