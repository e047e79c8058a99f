"""One stage alone: the executor's bookkeeping, and mechanisms that do not keep to what they declare."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megamem.data.batch import Batch
from megamem.errors import ContractError
from megamem.memory.base import Growing, TensorSpec
from megamem.model.objectives.next_token import NextToken
from megamem.pipeline.channels import Borders
from megamem.pipeline.executor import StageExecutor
from megamem.pipeline.schedule import stage_order
from megamem.pipeline.train_chunk import MicroBatch, chunk_places
from tests.unit.evaluation_helpers import CHUNK, CPU, VOCABULARY, make_stage

CHUNKS, ROWS = 4, 2
ALONE = SimpleNamespace(pp_rank=0, pp_size=1, device=CPU, forward_group=None, backward_group=None)


def micro_batch(seed=0):
    tokens = torch.randint(VOCABULARY, (CHUNKS * CHUNK + 1, ROWS), generator=torch.Generator().manual_seed(seed))
    starts = np.arange(0, CHUNKS * CHUNK, CHUNK)[:, None].repeat(ROWS, 1)
    batch = Batch(tokens[:-1], tokens[1:], starts, tuple(range(ROWS)))
    return MicroBatch(batch, chunk_places(batch))


def run(stage, bptt_chunks, executor=None, **options):
    executor = executor or StageExecutor(stage, NextToken(stage.config), 0, CHUNK, bptt_chunks)
    fresh = stage.initial_states(ROWS, CPU, torch.float64)
    borders = Borders(ALONE, [*stage_order(0, 1, 1, CHUNKS, bptt_chunks)], [], [], torch.float64)
    return executor, executor.run(
        [micro_batch()], lambda _: fresh, torch.ones((), dtype=torch.float64), borders, **options
    )


def test_every_action_is_announced_and_every_backward_prepared():
    stage, said, prepared = make_stage("elastic_memory"), [], []
    run(stage, 2, watch=said.append, before_backward=lambda: prepared.append(len(said)))
    words = [str(action) for action in stage_order(0, 1, 1, CHUNKS, 2)]
    assert said == [*words, "waiting for the last sends to leave"]
    assert words[0] == "forward of micro-batch 0, chunk 0"
    assert len(prepared) == CHUNKS


@pytest.mark.parametrize("bptt_chunks", [1, 2, 4])
def test_nothing_is_left_of_a_step(bptt_chunks):
    """No unit, no alias, and states without a graph."""
    stage = make_stage("elastic_memory")
    executor, (_, states) = run(stage, bptt_chunks)
    assert not executor._units
    assert not executor._aliases
    assert not any(
        t.requires_grad for state in states[0].values() for t in state.values() if isinstance(t, torch.Tensor)
    )


def test_states_are_made_where_a_sequence_begins_and_dropped_where_it_ends():
    """A step of many micro-batches holds the states of one."""
    stage, said, living = make_stage("elastic_memory"), [], []
    executor = StageExecutor(stage, NextToken(stage.config), 0, CHUNK, 1)

    def begin(sequence):
        said.append(f"states of {sequence}")
        living.append(dict(executor._states))
        return stage.initial_states(ROWS, CPU, torch.float64)

    borders = Borders(ALONE, [*stage_order(0, 1, 3, CHUNKS, 1)], [], [], torch.float64)
    one = torch.ones((), dtype=torch.float64)
    _, ends = executor.run([micro_batch(i) for i in range(3)], begin, one, borders, said.append, keep_states=False)
    assert not ends
    assert living == [{}, {}, {}]
    for sequence in range(3):
        at = said.index(f"states of {sequence}")
        assert said[at - 1] == f"forward of micro-batch {sequence}, chunk 0"


def test_entries_passed_on_by_reference_keep_their_alias():
    """Full attention appends to a list: each chunk's keys and values are aliased once, not once per later chunk."""
    stage = make_stage("full_attention")
    executor = StageExecutor(stage, NextToken(stage.config), 0, CHUNK, CHUNKS)
    links = []
    backward = executor._backward

    def count(action, gradient):
        links.append(len(executor._units[action.micro_batch, action.chunk].links))
        return backward(action, gradient)

    executor._backward = count
    run(stage, CHUNKS, executor)
    # last chunk first: it ends the window and hands nothing on, each other one hands on its own keys and values
    assert links[0] == 0
    assert len(set(links[1:])) == 1
    assert 1 <= links[1] <= 2


def test_recording_is_off_unless_asked_for():
    stage = make_stage("local_attention")
    executor, _ = run(stage, 4)
    assert executor.events is None
    executor.events = []
    run(stage, 4, executor)
    assert [event.action for event in executor.events] == stage_order(0, 1, 1, CHUNKS, 4)
    assert all(event.end >= event.start > 0 for event in executor.events)


@pytest.fixture
def faulty():
    """A stage whose second layer's memory gains a coefficient with every chunk, against its declaration."""
    stage = make_stage("elastic_memory")
    mixer = stage.own_layers[1].mixer
    forward = mixer.forward

    def grows(hidden, state, chunk):
        kept = {**state, "coefficients": state["coefficients"][:, : mixer.specs["coefficients"].shape[1]]}
        output, new, losses = forward(hidden, kept, chunk)
        return output, {**new, "coefficients": torch.cat((new["coefficients"], new["coefficients"][:, :1]), 1)}, losses

    mixer.forward = grows
    return stage


def test_a_state_of_another_shape_is_refused_with_its_layer(faulty):
    order = faulty.config.mixer_at(1).order
    with pytest.raises(ContractError) as caught:
        run(faulty, 4)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("model.layers.1 (elastic_memory): state coefficients has shape [2, ")
    assert f"[2, {order + 1}, 2, 4, 4]" in message
    assert f"but its TensorSpec declares ['batch', {order}, 2, 'kv_heads', 4] = [2, {order}, 2, 4, 4]" in message


def test_states_as_declared_pass(faulty):
    stage = make_stage("elastic_memory")
    run(stage, 4)
    stage.check_states(stage.initial_states(ROWS, CPU, torch.float64), ROWS)


def test_entries_of_growing_lists_are_checked():
    stage = make_stage("full_attention")
    _, (_, states) = run(stage, 4)
    mixer, state = stage.own_layers[1].mixer, states[0]["layers.1"]
    mixer.check_state(state, ROWS)
    (name, spec) = next((name, spec) for name, spec in mixer.specs.items() if isinstance(spec, Growing))
    part = next(part for part, declared in spec.entry.items() if isinstance(declared, TensorSpec))
    state[name][1] = {**state[name][1], part: state[name][1][part][..., :-1]}
    with pytest.raises(ContractError, match=rf"state {name}\[1\]\.{part} has shape"):
        mixer.check_state(state, ROWS)
