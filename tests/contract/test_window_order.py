"""Law 4 for windows that are read layer by layer (`training.window_order: layers`): everything equals one graph."""

from functools import cache

import pytest
import torch

from megamem.errors import ConfigError
from megamem.memory.base import Chunk, state_tensors
from megamem.model.objectives.next_token import NextToken
from megamem.pipeline.train_chunk import chunk_places, dropout_keys
from megamem.pipeline.window import Window
from tests.contract.case import CHUNK, Case
from tests.contract.cases import CASES
from tests.contract.driver import CPU, largest, within
from tests.contract.stages import CHUNKS, LAYERS, ROWS, SCALE, batches, built, one_graph

pytestmark = pytest.mark.whole_model

# float64: sums over tokens are taken in another order; as for pipelines
TOLERANCE = 1e-12
ELASTIC = Case("elastic_memory", "one_of_them", {"order": 5})
reference = cache(one_graph)


mixers = pytest.mark.parametrize("mixer", CASES, ids=lambda case: case.id)
"""Not architectures, nor mixers with side rows, whose cases are among those of architectures: `check_window_order`."""


@cache
def by_layer(case, bptt_chunks, recompute=False, ties_resets=False, inside=True, order="layers"):
    """What windows in an order find: losses, gradients, states at the ends; inside: see `batches`."""
    stage = built(case, range(LAYERS))
    stage.recompute, stage.ties_resets = recompute, ties_resets
    window = Window(stage, NextToken(stage.config), order=order)
    keys = dropout_keys(stage.config, 1, 2, range(ROWS))
    nats, ends = 0.0, []
    for batch in batches(case, inside):
        states, places = stage.initial_states(ROWS, CPU, torch.float64), chunk_places(batch, keys)
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
def test_documents_that_begin_where_chunks_do(mixer):
    """As packed data have them, rows at different places of their documents among them."""
    assert_equal(by_layer(mixer, CHUNKS, inside=False), reference(mixer, CHUNKS, inside=False))


@mixers
@pytest.mark.parametrize("recompute", [True, "mixer", "mlp"])
def test_what_is_computed_again_is_the_same(mixer, recompute):
    plain, again = by_layer(mixer, CHUNKS), by_layer(mixer, CHUNKS, recompute)
    assert plain["nats"] == again["nats"]
    for name, gradient in plain["grads"].items():
        assert gradient is None or torch.equal(gradient, again["grads"][name]), name


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention", "elastic_memory", "memorizing_attention"])
def test_the_same_shares_of_attention_are_dropped_in_both_orders(kind):
    """What is dropped goes by the place of a token, wherever a call begins."""
    drops, plain = Case(kind, "dropout", shape={"attention_dropout": 0.3}), Case(kind, "plain")
    found = by_layer(drops, CHUNKS, inside=False)
    assert_equal(found, by_layer(drops, CHUNKS, inside=False, order="chunks"))
    assert abs(found["nats"] - by_layer(plain, CHUNKS, inside=False)["nats"]) > 1e-3


@pytest.mark.parametrize("ties_resets", [True, False])
def test_states_that_documents_leave_behind_keep_their_place_in_the_backward_pass(ties_resets, monkeypatch):
    """With gradients of zero, where ZeRO 3 wants it: all rows begin a document in the middle of the window."""
    stage = built(ELASTIC, range(LAYERS))
    stage.ties_resets = ties_resets
    left = []
    for layer in stage.own_layers:
        reset = layer.mixer.reset

        def remember(state, chunk, *given, reset=reset):
            tensors = [each for each in state_tensors(state) if each.requires_grad]
            if all(chunk.fresh()) and tensors:
                left.extend(tensors)
                for tensor in tensors:
                    tensor.retain_grad()
            return reset(state, chunk, *given)

        monkeypatch.setattr(layer.mixer, "reset", remember)
    tokens = torch.arange(2 * CHUNK * ROWS).view(-1, ROWS) % 32
    window = Window(stage, NextToken(stage.config), order="layers")
    states = stage.initial_states(ROWS, CPU, torch.float64)
    total, _, _ = window(tokens, tokens, [Chunk((0,) * ROWS)] * 2, states, torch.tensor(1.0, dtype=torch.float64))
    total.backward()
    assert len(left) >= LAYERS
    for tensor in left:
        assert (tensor.grad is not None) == ties_resets
        assert tensor.grad is None or not tensor.grad.any()


@mixers
def test_ties_change_nothing(mixer):
    assert_equal(by_layer(mixer, CHUNKS, ties_resets=True), reference(mixer, CHUNKS))


def test_what_cannot_be_read_so_is_refused(monkeypatch):
    """Left padding; a mixer that waits for the MLP, which no built-in one without side rows does."""
    stage = built(ELASTIC, range(1))
    tokens, states = torch.zeros(2 * CHUNK, 1, dtype=torch.int64), stage.initial_states(1, CPU, torch.float64)
    with pytest.raises(ValueError, match="left padding are read chunk by chunk"):
        stage.read_window(tokens, states, [Chunk((-3,)), Chunk((CHUNK - 3,))])
    mixer = type(stage.own_layers[0].mixer)
    monkeypatch.setattr(mixer, "after_layer", lambda self, hidden, state, chunk: (hidden, state))
    named = rf"window_order layers does not go with {mixer.__name__} \(model.layers.0\), whose after_layer"
    with pytest.raises(ConfigError, match=named):
        stage.read_window(tokens, states, [Chunk((0,)), Chunk((CHUNK,))])
