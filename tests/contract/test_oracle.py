"""Law 5: outputs, final states and auxiliary losses equal a naive loop written from the equations."""

import importlib

import pytest

from tests.contract.case import CHUNK
from tests.contract.driver import LAYOUTS, every, inputs, largest, make, row_of, run, state_error, within

TOKENS = 4 * CHUNK + 3
# float64 against the token recurrence: matrix exponentials and their products over 35 tokens are the larger error
TOLERANCE = 1e-11


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_the_naive_loop(case, layout):
    subject, lanes = make(case, "mixer"), LAYOUTS[layout]
    mixer, model = subject.mixer, case.model()
    x = inputs(subject, TOKENS, len(lanes.begins))
    output, states, losses = run(subject, x, lanes, every(CHUNK, TOKENS))
    weights = {name: weight.detach() for name, weight in mixer.named_parameters()}
    oracle = importlib.import_module(f"tests.contract.oracles.{case.kind}")
    expected_losses = {}
    for row, part, last in lanes.documents(TOKENS):
        answer = oracle.run(model.mixer_at(0), model, weights, x[part, row])
        within("5 oracle: outputs", largest(output[part, row] - answer.output), TOLERANCE)
        if last:
            mine = row_of(mixer.specs, states["layers.0"], row)
            within("5 oracle: states", state_error(mixer.specs, mine, answer.state, lanes.aligned), TOLERANCE)
        for name, value in answer.losses.items():
            expected_losses[name] = expected_losses.get(name, 0) + value
    assert losses.keys() == expected_losses.keys()
    for name, value in expected_losses.items():
        within("5 oracle: losses", abs(float(losses[name].detach()) - float(value)), TOLERANCE)
