"""Law 10: a document gives what a fresh run on it alone gives; nothing leaks between documents, rows or padding."""

import pytest
import torch

from megamem.memory.base import Chunk
from tests.contract.cases import CHUNK
from tests.contract.driver import (
    LAYOUTS,
    SUBJECTS,
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
# float64: a masked column adds an exact zero, but sums run in another order over more columns
TOLERANCE = 1e-12


@pytest.mark.parametrize("step", [CHUNK, 5])
@pytest.mark.parametrize("layout", ["borders", "padded"])
@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_document_equals_a_fresh_run(case, subject, layout, step):
    subject, lanes = make(case, subject), LAYOUTS[layout]
    x = inputs(subject, TOKENS, len(lanes.begins))
    output, states, _ = run(subject, x, lanes, every(step, TOKENS))
    for row, part, last in lanes.documents(TOKENS):
        alone = x[part, row : row + 1]
        expected, expected_states, _ = run(subject, alone, one_grid(1), every(CHUNK, len(alone)))
        within("10 reset: outputs", largest(output[part, row] - expected[:, 0]), TOLERANCE)
        if last:
            for mixer, state, other in zip(subject.mixers, states.values(), expected_states.values(), strict=True):
                mine = row_of(mixer.specs, state, row)
                within("10 reset: states", state_error(mixer.specs, mine, other, lanes.aligned), TOLERANCE)


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
