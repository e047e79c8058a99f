"""The norms of queries and keys with weights of their own, as training makes them; the laws start from ones."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn

from megamem.memory.base import Chunk
from megamem.parallel.linears import PlainLinears, initialize_parameters
from tests.contract.cases import ALL_CASES

CASES = [case for case in ALL_CASES if case.shape.get("qk_norm")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_weights_count_channel_by_channel(case):
    model = case.model()
    mixer = model.mixer_at(0).build(model, PlainLinears(), 0)
    initialize_parameters(mixer, 0)
    mixer = mixer.double()
    generator = torch.Generator().manual_seed(3)
    for norm in (mixer.query_norm, mixer.key_norm):
        nn.init.uniform_(norm.weight, 0.5, 2.0, generator=generator)
    hidden = torch.randn(model.chunk_size, 1, model.hidden_size, dtype=torch.float64, generator=generator)
    state = mixer.initial_state(1, torch.device("cpu"), torch.float64)
    with torch.no_grad():
        output, *_ = mixer(hidden, state, Chunk((0,)))
    oracle = importlib.import_module(f"tests.contract.oracles.{case.kind}")
    weights = {name: parameter.detach() for name, parameter in mixer.named_parameters()}
    expected = oracle.run(model.mixer_at(0), model, weights, hidden[:, 0]).output
    torch.testing.assert_close(output[:, 0], expected, rtol=1e-10, atol=1e-11)
    one = {name: torch.ones_like(w) if name.endswith("_norm.weight") else w for name, w in weights.items()}
    assert not torch.allclose(output[:, 0], oracle.run(model.mixer_at(0), model, one, hidden[:, 0]).output, rtol=1e-3)
