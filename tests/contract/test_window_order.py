"""Law 4 for windows that are read layer by layer (`training.window_order: layers`): everything equals one graph."""

from functools import cache

import pytest
import torch

from megamem.memory.base import state_tensors
from megamem.model.objectives.next_token import NextToken
from megamem.pipeline.train_chunk import chunk_places
from megamem.pipeline.window import Window
from tests.contract.case import CHUNK
from tests.contract.cases import CASES
from tests.contract.driver import CPU, largest, within
from tests.contract.stages import CHUNKS, LAYERS, ROWS, SCALE, batches, built, one_graph

pytestmark = pytest.mark.whole_model

# float64: sums over tokens are taken in another order; as for pipelines
TOLERANCE = 1e-12
reference = cache(one_graph)


mixers = pytest.mark.parametrize("mixer", CASES, ids=lambda case: case.id)
"""Architectures, and mixers whose rows go up beside the tokens, are read chunk by chunk."""


@cache
def by_layer(case, bptt_chunks, recompute=False, ties_resets=False):
    """What windows in this order find: losses, gradients, states at the ends."""
    stage = built(case, range(LAYERS))
    stage.recompute, stage.ties_resets = recompute, ties_resets
    window = Window(stage, NextToken(stage.config), order="layers")
    nats, ends = 0.0, []
    for batch in batches(case):
        states, places = stage.initial_states(ROWS, CPU, torch.float64), chunk_places(batch)
        for first in range(0, CHUNKS, bptt_chunks):
            part = slice(first * CHUNK, (first + bptt_chunks) * CHUNK)
            scale = torch.tensor(SCALE, dtype=torch.float64)
            given = batch.tokens[part], batch.labels[part], places[first : first + bptt_chunks], states, scale
            total, losses, states = window(*given)
            nats += losses[0].item()
            total.backward()
        ends.append(states)
    return {"nats": nats, "grads": {name: p.grad for name, p in stage.named_parameters()}, "states": ends}


def assert_equal(found, expected):
    """Loss, gradients and states."""
    within("4 layer by layer: loss", abs(found["nats"] / expected["nats"] - 1), TOLERANCE)
    assert found["grads"].keys() == expected["grads"].keys()
    for name, exact in expected["grads"].items():
        if exact is None:  # a memory is written for a chunk beyond the window
            assert found["grads"][name] is None or largest(found["grads"][name]) == 0.0
            continue
        assert largest(exact) > 0, f"{name} has no gradient: the comparison would be empty"
        within("4 layer by layer: gradients", largest(found["grads"][name] - exact) / largest(exact), TOLERANCE)
    for ours, theirs in zip(found["states"], expected["states"], strict=True):
        for a, b in zip(state_tensors(ours), state_tensors(theirs), strict=True):
            within("4 layer by layer: states", largest(a - b) / max(largest(b), 1e-3), TOLERANCE)


@mixers
@pytest.mark.parametrize("window", [2, CHUNKS], ids=lambda window: f"bptt{window}")
def test_everything_is_that_of_one_graph(mixer, window):
    assert_equal(by_layer(mixer, window), reference(mixer, window))


@mixers
@pytest.mark.parametrize("recompute", [True, "mixer", "mlp"])
def test_what_is_computed_again_is_the_same(mixer, recompute):
    plain, again = by_layer(mixer, CHUNKS), by_layer(mixer, CHUNKS, recompute)
    assert plain["nats"] == again["nats"]
    for name, gradient in plain["grads"].items():
        assert gradient is None or torch.equal(gradient, again["grads"][name]), name


@mixers
def test_states_that_a_document_leaves_behind_change_nothing(mixer):
    assert_equal(by_layer(mixer, CHUNKS, ties_resets=True), reference(mixer, CHUNKS))
