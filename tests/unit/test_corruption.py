"""Noise in the local context: where it goes, what it leaves alone."""

import pytest
import torch

from megamem.config.evaluation import CorruptionConfig
from megamem.config.model import ModelConfig
from megamem.errors import ConfigError
from megamem.evaluation.corruption import corrupted
from megamem.evaluation.evaluator import Evaluator
from megamem.memory.attention import sliding_attention
from megamem.memory.base import Chunk, state_tensors
from megamem.model.stage import build_stage
from megamem.parallel.linears import PlainLinears, initialize_parameters
from tests.unit.evaluation_helpers import CHUNK, CPU, ROWS, VOCABULARY, documents, make_stage, model_config

TOKENS = torch.randint(VOCABULARY, (2 * CHUNK, 3), generator=torch.Generator().manual_seed(0))


def read(stage, **options):
    """Hidden outputs and the memory's states of two chunks."""
    states = stage.initial_states(3, CPU, torch.float64)
    outputs = []
    with torch.no_grad(), corrupted(stage, CorruptionConfig(**options)):
        for begin in (0, CHUNK):
            out, states, _ = stage(TOKENS[begin : begin + CHUNK], states, Chunk((begin,) * 3))
            outputs.append(out)
    return torch.cat(outputs), states


@pytest.mark.parametrize("kind", ["full_attention", "elastic_memory", "infini_attention"])
def test_nothing_is_left_behind(kind):
    stage = make_stage(kind)
    clean, _ = read(stage)
    noisy, _ = read(stage, share=0.5)
    assert not torch.allclose(noisy, clean)
    assert torch.equal(read(stage, share=0.5)[0], noisy), "the same noise each time"
    assert torch.equal(read(stage)[0], clean)
    with pytest.raises(KeyError), corrupted(stage, CorruptionConfig(share=0.5, layers="all", remembered=True)):
        raise KeyError
    assert torch.equal(read(stage)[0], clean)


def test_what_is_remembered_of_rising_rows_is_no_keys_and_values():
    """Noise in what is seen goes, in what is remembered not: that memory is written behind the MLP."""
    stage = make_stage("rising_melodi")
    assert not torch.allclose(read(stage, share=0.5)[0], read(stage)[0])
    with pytest.raises(ConfigError, match=r"true: melodi \(model layer 1\) writes its memory from hidden vectors"):
        read(stage, share=0.5, remembered=True)


def test_only_the_chosen_layers_are_touched():
    """The first layer is plain attention, the second the memory."""
    stage = make_stage("elastic_memory")
    plain = stage.layers["0"].mixer
    hidden = torch.randn(CHUNK, 3, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    state = plain.initial_state(3, CPU, torch.float64)
    clean, _, _ = plain(hidden, state, Chunk((0, 0, 0)))
    with corrupted(stage, CorruptionConfig(share=0.5)):
        assert torch.equal(plain(hidden, state, Chunk((0, 0, 0)))[0], clean)
    with corrupted(stage, CorruptionConfig(share=0.5, layers="all")):
        assert not torch.equal(plain(hidden, state, Chunk((0, 0, 0)))[0], clean)


@pytest.mark.parametrize("kind", ["full_attention", "elastic_memory", "infini_attention"])
def test_memories_store_what_was_there_unless_asked_otherwise(kind):
    stage = make_stage(kind)
    tensors = {
        name: [t.clone() for t in state_tensors(read(stage, **options)[1]["layers.1"])]
        for name, options in {
            "clean": {}, "local": {"share": 1.0}, "remembered": {"share": 1.0, "remembered": True},
        }.items()
    }  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(tensors["clean"], tensors["local"], strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(tensors["clean"], tensors["remembered"], strict=True))


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_a_share_of_each_rows_tokens_is_replaced_by_noise_of_their_scale(share):
    stage = make_stage("full_attention")
    mixer = stage.layers["1"].mixer
    generator = torch.Generator().manual_seed(2)
    keys = 3 + 2 * torch.randn(64, 2, 4, 64, generator=generator, dtype=torch.float64)
    values = torch.randn(64, 2, 4, 64, generator=generator, dtype=torch.float64)
    with corrupted(stage, CorruptionConfig(share=share)):
        new_keys, new_values = mixer.local(keys, values)
    changed = (new_keys != keys).all(3)
    assert torch.equal(changed, (new_values != values).all(3)), "keys and values of the same tokens"
    assert torch.equal(changed.any(2), changed.all(2)), "in all heads"
    assert changed[..., 0].sum(0).tolist() == [share * 64] * 2
    drawn = new_keys[changed[..., 0]]
    # at least 32 tokens x 4 heads x 64 channels: mean and deviation to 2 / sqrt(8192)
    assert drawn.mean() == pytest.approx(3, abs=0.1)
    assert drawn.std() == pytest.approx(2, abs=0.1)


def test_losses_are_those_of_the_corrupted_model():
    stage = make_stage("elastic_memory")
    texts = documents(60, 43)
    found = []
    for share in (0.0, 0.5):
        with corrupted(stage, CorruptionConfig(share=share, layers="all")):
            found.append(Evaluator(stage, rows=ROWS).losses(texts))
    assert found[0].tokens == found[1].tokens
    assert found[0].loss != found[1].loss


def test_noise_does_not_depend_on_the_tiles_of_a_window(monkeypatch):
    """Every token of a call is drawn once, whatever part of it a query is computed with."""
    mixer = {"kind": "sliding_attention", "window": CHUNK}
    model = {**model_config("local_attention").model_dump(), "memory": [{"layers": [1], "mixer": mixer}]}
    stage = build_stage(ModelConfig.model_validate(model), PlainLinears())
    initialize_parameters(stage.double(), 1)
    found = []
    for tokens in (2, CHUNK):
        monkeypatch.setattr(sliding_attention, "part_tokens", lambda window, tokens=tokens: tokens)
        found.append(read(stage, share=0.5))
    (outputs, states), (others, _) = found
    torch.testing.assert_close(outputs, others)
    assert not torch.allclose(outputs, read(stage)[0])
    for kept, clean in zip(state_tensors([states]), state_tensors([read(stage)[1]]), strict=True):
        torch.testing.assert_close(kept, clean)


def test_a_memory_among_the_tokens_is_refused():
    """It would become noise with the local context, and the model would seem to remember nothing."""
    model = model_config("local_attention").model_dump() | {"memory": [], "architecture": {"kind": "recurrent_memory"}}
    stage = build_stage(ModelConfig.model_validate(model), PlainLinears())
    for layers in ("memory", "all"):
        with pytest.raises(ConfigError, match="the memory of recurrent_memory stands among the tokens"):
            read(stage, share=1.0, layers=layers)


def test_a_model_without_memory_is_refused():
    with pytest.raises(ConfigError, match="no layer of the model has a memory"):
        read(make_stage("local_attention"), share=0.5)
    read(make_stage("local_attention"), share=0.5, layers="all")
