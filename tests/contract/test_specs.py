"""Law 8: states are what their declarations say, and the planner counts their bytes exactly."""

import pytest
import torch

from megamem.costs.state_bytes import model_state_bytes, state_bytes, state_sizes
from megamem.memory.base import Growing, state_tensors
from tests.contract.case import CHUNK
from tests.contract.driver import CPU, every, inputs, make, one_grid, run


def assert_declared(specs, state, sizes, dtype):
    """Names, shapes and dtypes of every tensor."""
    assert state.keys() == specs.keys()
    for name, spec in specs.items():
        if isinstance(spec, Growing):
            assert spec.limit is None or len(state[name]) <= spec.limit
            for entry in state[name]:
                assert_declared(spec.entry, entry, sizes, dtype)
        else:
            assert tuple(state[name].shape) == spec.sizes(sizes), name
            assert state[name].dtype == spec.torch_dtype(dtype), name


def measured(state):
    """Bytes the tensors really hold, views counted with all they keep alive."""
    return sum(tensor.untyped_storage().nbytes() for tensor in state_tensors(state))


@pytest.mark.every_case
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_states_match_their_declaration_at_every_chunk_border(case, rows, dtype):
    subject = make(case, "mixer", dtype)
    mixer, model = subject.mixer, case.model()
    sizes = state_sizes(model, "layers.0", rows)
    x = inputs(subject, 4 * CHUNK, rows).to(dtype)
    states = subject.initial_states(rows, CPU, dtype)
    assert_declared(mixer.specs, states["layers.0"], sizes, dtype)
    for chunks in range(1, 5):
        part = x[(chunks - 1) * CHUNK : chunks * CHUNK]
        with torch.no_grad():
            _, states, _ = subject(part, states, one_grid(rows).chunk((chunks - 1) * CHUNK))
        assert_declared(mixer.specs, states["layers.0"], sizes, dtype)  # sizes["open"] is 0
        planned = state_bytes(mixer.specs, sizes, dtype, chunks_seen=chunks)
        assert planned["open"] == 0
        assert planned["memory"] == measured(states["layers.0"])


@pytest.mark.every_case
def test_open_tensors_hold_no_more_than_the_open_chunk(case):
    subject = make(case, "mixer")
    x = inputs(subject, 2 * CHUNK, 2)
    states = subject.initial_states(2, CPU, x.dtype)
    for at in range(2 * CHUNK):
        with torch.no_grad():
            _, states, _ = subject(x[at : at + 1], states, one_grid(2).chunk(at))
        for name, spec in subject.mixer.specs.items():
            if not isinstance(spec, Growing) and (axis := spec.axis("open")) is not None:
                assert states["layers.0"][name].shape[axis] <= (at + 1) % CHUNK


def test_entries_of_growing_lists_pass_by_reference(case):
    """A finished entry is never copied: a long context costs its memory once."""
    subject = make(case, "mixer")
    x = inputs(subject, 3 * CHUNK, 1)
    with torch.no_grad():
        _, states, _ = run(subject, x[: 2 * CHUNK], one_grid(1), every(CHUNK, 2 * CHUNK))
        _, later, _ = subject(x[2 * CHUNK :], states, one_grid(1).chunk(2 * CHUNK))
    before, after = states["layers.0"], later["layers.0"]
    for name, spec in subject.mixer.specs.items():
        if isinstance(spec, Growing):
            kept = {id(tensor) for tensor in state_tensors(before[name])}
            new = len(spec.entry)
            assert all(id(tensor) in kept for tensor in list(state_tensors(after[name]))[:-new])


def test_a_call_leaves_its_input_state_as_it_was(case):
    """States are values: a window may be run again from a kept one."""
    subject = make(case, "mixer")
    x = inputs(subject, 3 * CHUNK, 2)
    _, states, _ = run(subject, x[: CHUNK + 3], one_grid(2), [CHUNK])
    copies = [tensor.clone() for tensor in state_tensors(states)]
    first = subject(x[CHUNK + 3 : 2 * CHUNK], states, one_grid(2).chunk(CHUNK + 3))[0]
    assert all(torch.equal(a, b) for a, b in zip(state_tensors(states), copies, strict=True))
    again = subject(x[CHUNK + 3 : 2 * CHUNK], states, one_grid(2).chunk(CHUNK + 3))[0]
    assert torch.equal(first, again)


@pytest.mark.whole_model
@pytest.mark.parametrize("tokens", [0, CHUNK, 3 * CHUNK])
def test_the_planner_counts_a_whole_model(case, tokens):
    subject = make(case, "stage", torch.float32)
    states = subject.initial_states(2, CPU, torch.float32)
    if tokens:
        with torch.no_grad():
            states = run(subject, inputs(subject, tokens, 2), one_grid(2), every(CHUNK, tokens))[1]
    planned = model_state_bytes(subject.config, 2, torch.float32, context_tokens=tokens)
    assert planned == {"memory": sum(measured(state) for state in states.values()), "open": 0}
