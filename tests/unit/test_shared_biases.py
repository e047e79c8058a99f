"""One pair of u and v for all layers with segment attention: what layers with a pair each compute, gradients summed."""

from __future__ import annotations

import copy

import pytest
import torch
from pydantic import ValidationError

from megamem.config.model import MIXERS, ModelConfig
from megamem.costs.parameters import parameter_counts
from megamem.memory.base import Chunk, detach
from megamem.model.stage import build_stage
from megamem.parallel.linears import PlainLinears, initialize_parameters
from megamem.planning.ranks import stage_parameters

CHUNK = 8
KINDS = {
    "transformer_xl": {"kind": "transformer_xl", "memory_length": 12},
    "compressive_transformer": {"kind": "compressive_transformer", "ratio": 4},
    "infinity_former": {
        "kind": "infinity_former", "short_memory": 8, "basis": 8, "widths": [0.1], "samples": 8,
    },
    "lamemo": {"kind": "lamemo"},
    "sequential": {"kind": "sequential", "mixers": [{"kind": "transformer_xl"}, {"kind": "local_attention"}]},
}  # fmt: skip
SHARED = "score_biases."


def model_of(kind, shared, **changes):
    mixer = copy.deepcopy(KINDS[kind])
    (mixer["mixers"][0] if kind == "sequential" else mixer)["shared_biases"] = shared
    return ModelConfig.model_validate({
        "layers": 3, "hidden_size": 16, "heads": 2, "chunk_size": CHUNK, "vocab_size": 32, "ffn_size": 12,
        "init_std": 0.3, "mixer": mixer, "memory": [{"layers": [1], "mixer": "local_attention"}], **changes,
    })  # fmt: skip


def stage_of(model):
    stage = build_stage(model, PlainLinears()).double()
    initialize_parameters(stage, 0)
    return stage


def train(stage):
    """The loss of four chunks, with gradients of two at a time."""
    generator = torch.Generator().manual_seed(2)
    tokens, labels = torch.randint(32, (2, 4 * CHUNK, 3), generator=generator)
    states, total = stage.initial_states(3, tokens.device, torch.float64), torch.zeros((), dtype=torch.float64)
    for chunk in range(4):
        if chunk == 2:
            states = detach(states)
        part = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
        hidden, states, losses = stage.read_chunk(tokens[part], states, Chunk((chunk * CHUNK,) * 3))
        total = total + stage.token_losses(hidden, labels[part]).sum() + sum(losses.values())
    total.backward()
    return total.item()


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_a_pair_for_each_layer_with_summed_gradients(kind):
    shared, own = stage_of(model_of(kind, True)), stage_of(model_of(kind, False))
    weights = dict(shared.named_parameters())
    # another v for rows that look ahead, in all layers but the topmost one
    layers = {"content": 2, "distance": 2, **({"ahead": 1} if kind == "lamemo" else {})}
    assert sorted(name for name in weights if "biases" in name) == sorted(f"{SHARED}{name}" for name in layers)
    with torch.no_grad():
        for name, parameter in own.named_parameters():
            source = f"{SHARED}{name.rpartition('.')[2]}" if ".biases." in name else name
            parameter.copy_(weights[source])
    # the same sums in another order
    assert train(shared) == pytest.approx(train(own), abs=1e-10)
    theirs = dict(own.named_parameters())
    for name, parameter in weights.items():
        if name.startswith(SHARED):
            end = f".biases.{name.removeprefix(SHARED)}"
            expected = torch.stack([p.grad for other, p in theirs.items() if other.endswith(end)])
            assert len(expected) == layers[name.removeprefix(SHARED)]
            torch.testing.assert_close(parameter.grad, expected.sum(0), rtol=0, atol=1e-10)
        else:
            torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_counted_once(kind):
    for shared in (False, True):
        model = model_of(kind, shared)
        stage = build_stage(model, PlainLinears())
        count = sum(p.numel() for p in stage.parameters())
        assert parameter_counts(model)["total"] == count
        assert stage_parameters(model, range(3), 1) == count
        for layers in (range(1), range(1, 2), range(1, 3)):
            part = build_stage(model, PlainLinears(), layers)
            assert stage_parameters(model, layers, 1) == sum(p.numel() for p in part.parameters())


def test_a_copy_of_a_model_shares_its_own():
    stage = stage_of(model_of("transformer_xl", True))
    copied = copy.deepcopy(stage)
    with torch.no_grad():
        stage.score_biases.content.zero_()
    loss = train(copied)
    assert copied.score_biases.content.grad.any()
    assert loss == train(stage_of(model_of("transformer_xl", True)))


def test_a_layer_outside_of_a_model_has_its_own():
    model = model_of("transformer_xl", True)
    mixer = model.mixer.build(model, PlainLinears(), 0)
    assert "biases.content" in dict(mixer.named_parameters())


def test_local_attention_has_none_to_share():
    model = model_of("transformer_xl", False).model_dump(mode="json")
    with pytest.raises(ValidationError, match="shared_biases true needs a short_memory"):
        ModelConfig.model_validate({**model, "mixer": {"kind": "infinity_former", "shared_biases": True}})
    assert not MIXERS.parse("infinity_former").shared_biases
