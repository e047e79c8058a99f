"""Law 10: a document gives what a fresh run on it alone gives; nothing leaks between documents, rows or padding."""

import pytest
import torch

from megamem.memory.base import Chunk
from megamem.model.stage import Stage
from tests.contract.case import CHUNK
from tests.contract.driver import (
    ANYWHERE,
    LAYOUTS,
    Lanes,
    every,
    inputs,
    largest,
    make,
    one_grid,
    row_of,
    run,
    state_error,
    within,
)

TOKENS = 5 * CHUNK + 3
# an architecture whose rows share a grid reads one row at a time where documents begin anywhere
ROWS = [Lanes((row,)) for row in ANYWHERE.begins]
# float64: a masked column adds an exact zero, but sums run in another order over more columns
TOLERANCE = 1e-12


@pytest.mark.parametrize("step", [CHUNK, 5])
@pytest.mark.parametrize("layout", ["borders", "padded"])
def test_a_document_equals_a_fresh_run(case, subject, layout, step):
    subject, lanes = make(case, subject), LAYOUTS[layout]
    x = inputs(subject, TOKENS, len(lanes.begins))
    output, states, _ = run(subject, x, lanes, every(step, TOKENS))
    compare_documents(subject, lanes, x, output, states)


def compare_documents(subject, lanes, x, output, states):
    """Compare each document's outputs, and each row's state at its end, with those of a fresh run on it alone."""
    for row, part, last in lanes.documents(TOKENS):
        alone = x[part, row : row + 1]
        expected, expected_states, _ = run(subject, alone, one_grid(1), every(CHUNK, len(alone)))
        within("10 reset: outputs", largest(output[part, row] - expected[:, 0]), TOLERANCE)
        if isinstance(subject, Stage):
            labels = alone.roll(-1, 0)
            with torch.no_grad():
                losses = [subject.token_losses(hidden, labels) for hidden in (output[part, row : row + 1], expected)]
            within("10 reset: losses", largest(losses[0] - losses[1]), TOLERANCE)
        if last and states:
            for name, component in subject.components.items():
                mine = row_of(component.specs, states[name], row)
                error = state_error(component.specs, mine, expected_states[name], lanes.aligned)
                within("10 reset: states", error, TOLERANCE)


@pytest.mark.parametrize("step", [TOKENS, CHUNK, 5])
def test_a_document_that_begins_inside_a_call_equals_a_fresh_run(case, subject, step):
    subject = make(case, subject)
    for lanes in ROWS if subject.one_grid else [ANYWHERE]:
        x = inputs(subject, TOKENS, len(lanes.begins))
        output, states, _ = run(subject, x, lanes, every(step, TOKENS), inside=True)
        compare_documents(subject, lanes, x, output, states)


def test_calls_cut_where_documents_begin_give_the_same(case):
    """What a layer does around a mixer that does not read borders itself."""
    subject = make(case, "stage")
    if subject.one_grid:
        return  # its layers never see a border: the stage cuts the calls
    x = inputs(subject, TOKENS, len(ANYWHERE.begins))
    with torch.no_grad():
        expected, states, _ = run(subject, x, ANYWHERE, every(CHUNK, TOKENS), inside=True)
        for mixer in subject.components.values():
            mixer.reads_borders = False
        cut, cut_states, _ = run(subject, x, ANYWHERE, every(CHUNK, TOKENS), inside=True)
    within("10 reset: cut calls", largest(cut - expected), TOLERANCE)
    for name, component in subject.components.items():
        error = state_error(component.specs, cut_states[name], states[name])
        within("10 reset: cut calls", error, TOLERANCE)


def test_no_gradient_leaves_a_document_that_begins_inside_a_call(case):
    subject = make(case, "mixer")
    x = inputs(subject, TOKENS, len(ANYWHERE.begins)).requires_grad_()
    output = run(subject, x, ANYWHERE, every(2 * CHUNK, TOKENS), inside=True)[0]
    for row, part, _ in ANYWHERE.documents(TOKENS):
        (grad,) = torch.autograd.grad(output[part, row].square().sum(), x, retain_graph=True)
        inside = torch.zeros(TOKENS, len(ANYWHERE.begins), dtype=torch.bool)
        inside[part, row] = True
        others = [other for other in range(len(ANYWHERE.begins)) if other != row]
        assert largest(grad[:, others]) == 0.0
        # within a row, the triangular solve of a delta rule rounds over the whole inner chunk: 1e-17 was measured
        within("10 reset: gradients", largest(grad[~inside]), 1e-15)
        assert largest(grad[inside]) > 1e-6


@pytest.mark.parametrize("layout", ["borders", "padded"])
def test_no_gradient_reaches_another_document(case, layout):
    subject, lanes = make(case, "mixer"), LAYOUTS[layout]
    x = inputs(subject, TOKENS, len(lanes.begins)).requires_grad_()
    output = run(subject, x, lanes, every(CHUNK, TOKENS))[0]
    for row, part, _ in lanes.documents(TOKENS):
        (grad,) = torch.autograd.grad(output[part, row].square().sum(), x, retain_graph=True)
        inside = torch.zeros(TOKENS, len(lanes.begins), dtype=torch.bool)
        inside[part, row] = True
        assert largest(grad[~inside]) == 0.0
        assert largest(grad[inside]) > 1e-6


def test_resetting_keeps_the_rows_that_go_on(case):
    """`Mixer.reset` gives fresh rows where documents start and the same values elsewhere."""
    subject = make(case, "mixer")
    mixer, x = subject.mixer, inputs(subject, 2 * CHUNK, 2)
    state = run(subject, x, one_grid(2), every(CHUNK, 2 * CHUNK))[1]["layers.0"]
    reset = mixer.reset(state, Chunk((2 * CHUNK, 0)), x.device, x.dtype)
    fresh = mixer.initial_state(1, x.device, x.dtype)
    assert state_error(mixer.specs, row_of(mixer.specs, reset, 0), row_of(mixer.specs, state, 0)) == 0.0
    assert state_error(mixer.specs, row_of(mixer.specs, reset, 1), fresh) == 0.0
