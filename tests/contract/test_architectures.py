"""Laws 5 to 8 and 10 for architectures: what the other files check on bare mixers, here on whole models.

Laws 1 to 4 and 9, and the rest of 6, 8 and 10, run on architectures in the files of these laws.
"""

import importlib

import pytest
import torch

from megamem.costs.state_bytes import state_sizes
from megamem.memory.base import Chunk, detach, map_state, state_tensors
from megamem.model.stage import build_stage
from megamem.parallel.linears import PlainLinears, initialize_parameters
from tests.contract.case import CHUNK
from tests.contract.cases import ARCHITECTURES
from tests.contract.driver import (
    CPU,
    LAYOUTS,
    every,
    has_memory,
    inputs,
    largest,
    make,
    one_grid,
    row_of,
    run,
    state_error,
    within,
)
from tests.contract.paths import along_path
from tests.contract.test_specs import assert_declared, measured

TOKENS = 3 * CHUNK + 3


def memory_components(stage):
    """The components in which this architecture keeps its memory: those that span the model, or else its layers.

    What side rows are made of comes with the layers.
    """
    return list(stage.model_memories or {**stage.layer_components, **stage.beside_layers, **stage.entry_memories})


def differentiable(stage):
    """Whether gradients reach the chunk before: layers stop them, or all let them pass."""
    (passes,) = {getattr(component, "differentiable_state", True) for component in stage.layer_components.values()}
    return bool(stage.model_memories or stage.beside_layers) or passes


architectures = pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda case: case.id)


@architectures
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_the_naive_loop(architecture, layout):
    """Law 5, per document."""
    subject, lanes = make(architecture, "stage"), LAYOUTS[layout]
    x = inputs(subject, TOKENS, len(lanes.begins))
    output, states, _ = run(subject, x, lanes, every(CHUNK, TOKENS))
    weights = {name: weight.detach() for name, weight in subject.named_parameters()}
    oracle = importlib.import_module(f"tests.contract.oracles.architectures.{architecture.kind}")
    settings = subject.config.architecture
    for row, part, last in lanes.documents(TOKENS):
        expected = oracle.run(settings, subject.config, weights, x[part, row])
        # as for mixers: the loops' own rounding, here through three layers
        within("5 oracle: outputs", largest(output[part, row] - expected.output), 1e-11)
        for name, state in expected.state.items() if last and states else ():
            specs = subject.state_specs[name]
            within("5 oracle: states", state_error(specs, row_of(specs, states[name], row), state), 1e-11)


@architectures
def test_gradients_match_finite_differences(architecture):
    """Law 6: with respect to the incoming memory and every parameter; two calls, the second a chunk later."""
    model = architecture.model(heads=2, head_dim=2)
    # rows that come where a chunk begins are only read by the topmost layer
    layers = 2 if model.side_rows is not None and model.side_rows.before else model.layers
    model = model.model_copy(update={"layers": layers})
    stage = along_path(build_stage(model, PlainLinears()))
    initialize_parameters(stage, 1)
    stage.double()
    x = inputs(stage, 2 * CHUNK, 1)
    states = stage.initial_states(1, CPU, torch.float64)
    states = detach(stage(x[:CHUNK], states, Chunk((0,)))[1])
    names = [name for name, _ in stage.named_parameters()]
    memories = {name: states[name] for name in memory_components(stage)}
    arguments = [t.detach().clone() for t in (*state_tensors(memories), *stage.parameters())]
    for i, argument in enumerate(arguments):
        argument.requires_grad_(i >= len(arguments) - len(names) or differentiable(stage))

    def call(*arguments):
        given = iter(arguments)
        before = {**states, **map_state(lambda _: next(given), memories)}
        weights = dict(zip(names, given, strict=True))
        output, after, _ = torch.func.functional_call(stage, weights, (x[CHUNK:], before, Chunk((CHUNK,))))
        return (output, *(t for t in state_tensors({name: after[name] for name in memories}) if t.requires_grad))

    # central differences of step 1e-6 in float64, as for mixers
    assert torch.autograd.gradcheck(call, arguments, eps=1e-6, atol=1e-7, rtol=1e-6)


@architectures
def test_gradients_reach_the_chunk_before(architecture):
    """Law 6: through the memory, from what is read in the next chunk to the parameters that wrote it, or not at all."""
    subject = make(architecture, "stage")
    x = inputs(subject, 2 * CHUNK, 1)
    states = subject.initial_states(1, CPU, torch.float64)
    _, states, _ = subject(x[:CHUNK], states, Chunk((0,)))
    if not differentiable(subject):
        assert not any(tensor.requires_grad for tensor in state_tensors(states))
        return
    if not any(map(has_memory, subject.components.values())):
        assert not any(tensor.numel() for tensor in state_tensors(states)), "a control without memory"
        return
    memories = [t for t in state_tensors([states[name] for name in memory_components(subject)]) if t.numel()]
    output, _, _ = subject(x[CHUNK:], states, Chunk((CHUNK,)))
    for grad in torch.autograd.grad(output.square().sum(), memories):
        assert largest(grad) > 1e-6


@architectures
def test_bfloat16_stays_near_float64(architecture):
    """Law 7: 96 chunks with the same BF16 weights; the error stays small and grows no faster than a random walk."""
    # with the laws' weights of 0.3 a memory that passes through all layers is chaotic: any difference grows until it
    # is as large as the signal, whatever the precision; with 0.1 what is read forgets what came long before
    model = architecture.model(layers=3, at=1).model_copy(update={"init_std": 0.1})
    low, high = (along_path(build_stage(model, PlainLinears())) for _ in range(2))
    for stage in (low, high):
        initialize_parameters(stage, 1)
        stage.bfloat16()
    high.double()
    chunks, rows = 96, 2
    x = inputs(low, chunks * CHUNK, rows, seed=11)
    errors, sizes = [], []
    states = {False: low.initial_states(rows, CPU, torch.bfloat16), True: high.initial_states(rows, CPU, torch.float64)}
    with torch.no_grad():
        for c in range(chunks):
            part, where = x[c * CHUNK : (c + 1) * CHUNK], one_grid(rows).chunk(c * CHUNK)
            ours, states[False], _ = low(part, states[False], where)
            exact, states[True], _ = high(part, states[True], where)
            assert ours.isfinite().all()
            errors.append((ours.double() - exact).norm().item())
            sizes.append(exact.norm().item())
    relative = [error / size for error, size in zip(errors, sizes, strict=True)]
    # as for bare mixers: with small weights three layers round no more than one mixer with large ones
    within("7 BF16: whole models, mean of the stream", sum(relative) / chunks, 2e-2)
    # a memory that goes through the residual stream again and again keeps each chunk's rounding: a random walk, whose
    # size grows as the root of the number of chunks, and no faster
    walk = sum(c**0.5 for c in range(chunks - 32, chunks)) / sum(c**0.5 for c in range(1, 33))
    within("7 BF16: whole models, late over early error", sum(errors[-32:]) / sum(errors[1:33]), walk)


@architectures
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_states_match_their_declaration_at_every_chunk_border(architecture, dtype):
    """Law 8: names, shapes, dtypes and bytes of every component."""
    subject, rows = make(architecture, "stage", dtype), 3
    states = subject.initial_states(rows, CPU, dtype)
    x = inputs(subject, 3 * CHUNK, rows)
    for chunk in range(4):
        assert states.keys() == subject.state_specs.keys() == subject.config.component_specs().keys()
        for name, specs in subject.state_specs.items():
            assert_declared(specs, states[name], state_sizes(subject.config, name, rows), dtype)
        if chunk < 3:
            with torch.no_grad():
                part = x[chunk * CHUNK : (chunk + 1) * CHUNK]
                _, states, _ = subject(part, states, one_grid(rows).chunk(chunk * CHUNK))
    for name in memory_components(subject):
        specs, sizes = subject.state_specs[name].values(), state_sizes(subject.config, name, rows)
        declared = sum(torch.empty(spec.sizes(sizes), dtype=spec.torch_dtype(dtype)).nbytes for spec in specs)
        assert measured(states[name]) == declared


@architectures
def test_no_gradient_reaches_another_document(architecture):
    """Law 10: every place of every row reads a token of its own, whose embedding shows what reached it."""
    lanes, tokens = LAYOUTS["borders"], 4 * CHUNK
    rows = len(lanes.begins)
    model = architecture.model(layers=2).model_copy(update={"vocab_size": tokens * rows})
    stage = along_path(build_stage(model, PlainLinears()))
    initialize_parameters(stage, 1)
    stage.double()
    x = torch.arange(tokens * rows).view(tokens, rows)
    output = run(stage, x, lanes, every(CHUNK, tokens))[0]
    unread = set(model.architecture.unread_places(model))
    for row, part, _ in lanes.documents(tokens):
        (grad,) = torch.autograd.grad(output[part, row].square().sum(), stage.embedding.weight, retain_graph=True)
        reached = grad.view(tokens, rows, -1).abs().amax(-1)
        inside = torch.zeros(tokens, rows, dtype=torch.bool)
        inside[part, row] = True
        assert largest(reached[~inside]) == 0.0
        read = [place for place in range(part.start, part.stop) if place % CHUNK not in unread]
        assert reached[read, row].min() > 1e-9
