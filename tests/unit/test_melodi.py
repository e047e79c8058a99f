"""What is special about Melodi's long-term memory: which entries it holds, its gate, its size."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from megamem.config.model import ModelConfig
from megamem.memory.base import Chunk, State
from megamem.memory.compressive.melodi import MelodiConfig
from megamem.parallel.linears import PlainLinears, info
from tests.contract.case import CHUNK, Case

CPU = torch.device("cpu")


def model(**options: object) -> ModelConfig:
    return Case("melodi", "", {"summaries": 3, **options}).model()


def built(**options: object) -> torch.nn.Module:
    config = model(**options)
    mixer = config.mixer_at(0).build(config, PlainLinears(), 0).double()
    generator = torch.Generator().manual_seed(0)
    for _, parameter in sorted(mixer.named_parameters()):
        start = info(parameter).init(tuple(parameter.shape), generator)
        parameter.data.copy_(start)
    return mixer


def read(mixer: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, list[State]]:
    """All outputs, and the state after each chunk."""
    state, outputs, states = mixer.initial_state(x.shape[1], CPU, x.dtype), [], []
    for start in range(0, x.shape[0], CHUNK):
        output, state, _ = mixer(x[start : start + CHUNK], state, Chunk((start,) * x.shape[1]))
        outputs.append(output)
        states.append(state)
    return torch.cat(outputs), states


def tokens(chunks: int, batch: int = 1) -> torch.Tensor:
    return torch.randn(chunks * CHUNK, batch, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_each_block_adds_its_entries_and_the_oldest_leave() -> None:
    mixer = built(long_memory=5, long_increment=2)
    _, states = read(mixer, tokens(4))
    added = []
    for chunk, state in enumerate(states):
        with torch.no_grad():
            entries = mixer._normed(mixer.long_entries(state["memory"]))
            added.append(mixer.keys(entries))
        expected = torch.cat(added)[-5:]
        torch.testing.assert_close(state["long_keys"][-len(expected) :], expected, rtol=0, atol=1e-14)
        assert not state["long_keys"][: -len(expected)].any(), chunk


def test_a_closed_gate_leaves_melodi_without_long_memory() -> None:
    """sigmoid(-40) = 4e-18: nothing of the long memory in float64."""
    x = tokens(4)
    closed, without = built(long_memory=8, long_increment=4, gate_init=-40.0), built()
    without.load_state_dict(closed.state_dict(), strict=False)
    torch.testing.assert_close(read(closed, x)[0], read(without, x)[0], rtol=0, atol=1e-14)


def test_it_is_read_from_the_second_block_on() -> None:
    x = tokens(3)
    mixer, without = built(long_memory=8, long_increment=4), built()
    without.load_state_dict(mixer.state_dict(), strict=False)
    difference = (read(mixer, x)[0] - read(without, x)[0]).abs().amax(dim=(1, 2)).view(3, CHUNK)
    assert not difference[0].any()
    assert difference[1:].min() > 1e-3


def test_its_sizes_are_those_the_configuration_promises() -> None:
    config = model(long_memory=8, long_increment=4)
    plain = model()
    added = config.mixer_at(0).extra_parameters(config) - plain.mixer_at(0).extra_parameters(plain)
    assert added == 3 * 4 + 16  # mixtures of 3 summaries; a gate per channel
    extra = set(dict(built(long_memory=8, long_increment=4).named_parameters())) - set(dict(built().named_parameters()))
    assert extra == {"long_entries.weight", "gate.logit"}


def test_more_new_entries_than_places_are_refused() -> None:
    with pytest.raises(ValidationError, match="long_increment 32 is more than long_memory 16"):
        MelodiConfig(long_memory=16)
