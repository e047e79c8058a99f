"""Law 1: a token changes no output before it, and does change the outputs it should."""

import pytest

from tests.contract.case import CHUNK
from tests.contract.driver import every, has_memory, inputs, largest, make, one_grid, run, within

TOKENS = 3 * CHUNK
# at a chunk's first, inner and last token, and around a block border inside a chunk
PLACES = [0, 1, 3, 4, CHUNK - 1, CHUNK, CHUNK + 3, 2 * CHUNK - 1, 2 * CHUNK + 4]


def changed(subject, x, at, seed):
    """x with the token at `at` of the first row replaced."""
    y = x.clone()
    if x.is_floating_point():
        y[at, 0] = inputs(subject, 1, 1, 1000 + seed)[0, 0]
    else:
        y[at, 0] = (x[at, 0] + 1 + seed % 7) % subject.config.vocab_size
    return y


@pytest.mark.parametrize("step", [CHUNK, 5, TOKENS])
def test_outputs_before_a_changed_token_stay(case, subject, step):
    subject = make(case, subject)
    x = inputs(subject, TOKENS, 2)
    before = run(subject, x, one_grid(2), every(step, TOKENS))[0]
    unread = case.model().architecture.unread_places(case.model())
    for at in PLACES:
        after = run(subject, changed(subject, x, at, at), one_grid(2), every(step, TOKENS))[0]
        difference = (after - before).abs().amax(-1)
        # float64; a kernel may sum the terms it masks with weight 0 in other blocks, so not quite bit for bit
        within("1 causality", largest(difference[:at, 0]), 1e-12)
        within("1 causality: other rows", largest(difference[:, 1]), 1e-12)
        # the token itself sees its own change: the test would notice an output that depends on nothing
        if at % CHUNK in unread:
            assert difference[at, 0] == 0.0
        else:
            assert difference[at, 0] > 1e-6


def test_a_memory_carries_a_change_across_the_chunk_border_and_nothing_else_does(case, subject):
    subject = make(case, subject)
    x = inputs(subject, TOKENS, 1)
    before = run(subject, x, one_grid(1), every(CHUNK, TOKENS))[0]
    # near the border: a memory may keep a block's last tokens only
    after = run(subject, changed(subject, x, CHUNK - 2, 2), one_grid(1), every(CHUNK, TOKENS))[0]
    effect = largest((after - before)[CHUNK : 2 * CHUNK])
    if any(has_memory(component) for component in subject.components.values()):
        assert effect > 1e-6
    else:
        assert effect == 0.0
