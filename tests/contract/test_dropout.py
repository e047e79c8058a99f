"""Dropout keeps the laws of streaming and of rows: what is dropped follows from a token's place alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megamem.memory.base import States
from megamem.ops.dropout import DropoutKeys
from tests.contract.case import CHUNK, Case
from tests.contract.driver import ANYWHERE, BORDERS, CPU, Lanes, Subject, every, inputs, largest, make, one_grid, within

pytestmark = pytest.mark.whole_model

TOKENS = 4 * CHUNK + 5
SHARES = {"dropout": 0.2, "attention_dropout": 0.3}
LAYOUTS = {"one_grid": one_grid(2), "borders": BORDERS, "anywhere": ANYWHERE}
SPLITS = {"whole": [], "odd": [1, 4, 9, 10, 17, 22, 23, 31, 36], "token_by_token": every(1, TOKENS)}
# float64: sums in another order, of shares that are divided by 0.7 as well; the largest difference seen is 6e-14
TOLERANCE = 1e-12


def dropping(case: Case, **shares: float) -> Case:
    """The same case with dropout in its model; of attention only where there is softmax attention."""
    model = case.model()
    softmax = any(model.mixer_at(layer).query_key_norms() for layer in range(model.layers))
    given = {**SHARES, **shares} if softmax else {**SHARES, "attention_dropout": 0.0, **shares}
    return replace(case, shape={**case.shape, **given})


def keys(rows: Iterable[int], step: int = 0) -> DropoutKeys:
    return DropoutKeys.of(7, step, rows)


def read(
    subject: Subject, x: Tensor, lanes: Lanes, cuts: Iterable[int], drops: DropoutKeys | None, inside: bool = False
) -> Tensor:
    """Outputs of all tokens [tokens, rows, width], read in the calls that `cuts` make; inside: see `driver.run`."""
    states: States = subject.initial_states(x.shape[1], CPU, torch.float64)
    # where rows share a grid no call crosses a chunk's border
    cuts = sorted({*cuts, *(every(CHUNK, TOKENS) if subject.one_grid else ())})
    outputs = []
    for call in lanes.calls(x.shape[0], cuts, inside=inside):
        place = lanes.place(call) if inside else lanes.chunk(call.start)
        output, states, _ = subject(x[call], states, replace(place, dropout=drops and drops.after(call.start)))
        outputs.append(output)
    return torch.cat(outputs)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_splits_agree(case, layout):
    """Split calls drop what whole ones do."""
    subject, lanes, inside = make(dropping(case), "stage"), LAYOUTS[layout], layout == "anywhere"
    if inside and subject.one_grid:
        lanes = Lanes(ANYWHERE.begins[:1])  # such models read these one row at a time
    if not inside and len({subject.grid_place(start) for start in lanes.chunk(2 * CHUNK).starts}) > 1:
        lanes = Lanes(BORDERS.begins[1:2])  # inside chunks such rows are read apart
    x, drops = inputs(subject, TOKENS, len(lanes.begins)), keys(range(len(lanes.begins)))
    expected = read(subject, x, lanes, every(CHUNK, TOKENS), drops, inside)
    assert largest(expected - read(subject, x, lanes, every(CHUNK, TOKENS), None, inside)) > 0.1
    for name, cuts in SPLITS.items():
        if name != "token_by_token" or layout == "one_grid":
            within("dropout: streaming", largest(read(subject, x, lanes, cuts, drops, inside) - expected), TOLERANCE)


def test_rows_do_not_depend_on_their_batch(case):
    """A row reads the same alone, with its own key, as beside others."""
    subject = make(dropping(case), "stage")
    x, cuts = inputs(subject, TOKENS, 3), every(CHUNK, TOKENS)
    together = read(subject, x, one_grid(3), cuts, keys(range(3)))
    for row in range(3):
        alone = read(subject, x[:, row : row + 1], one_grid(1), cuts, keys([row]))
        within("dropout: rows", largest(together[:, row : row + 1] - alone), TOLERANCE)
    assert largest(together - read(subject, x, one_grid(3), cuts, keys(range(3), step=1))) > 0.1
