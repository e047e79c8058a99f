"""docs/add_a_mechanism.md followed for real: its mechanism and oracle keep the laws, train a step and are planned."""

import ast
import re
import sys
import types

import pytest
import torch

from megamem.config.model import MIXERS
from megamem.costs.flops import flops_by_part
from megamem.costs.state_bytes import model_state_bytes
from megamem.memory.base import Chunk
from megamem.model.stage import build_stage
from megamem.parallel.linears import PlainLinears, initialize_parameters
from tests.contract import test_causality, test_gradients, test_oracle, test_reset, test_specs, test_streaming
from tests.contract.case import CHUNK, Case
from tests.snippets import ROOT, python_snippets
from tests.unit import counted_flops

MECHANISM, ORACLE = "megamem.memory.recurrent.moving_average", "tests.contract.oracles.moving_average"


@pytest.fixture(scope="module")
def case():
    """The page's case, its two files in place for the time of these tests."""
    for name, code in zip((MECHANISM, ORACLE), python_snippets("docs/add_a_mechanism.md"), strict=True):
        module = types.ModuleType(name)
        sys.modules[name] = module
        exec(code, module.__dict__)
    page = (ROOT / "docs" / "add_a_mechanism.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^    (Case\(.*\)),$", page, flags=re.M)
    try:
        yield eval(line, {"Case": Case})
    finally:
        MIXERS._known.pop("moving_average")
        for name in (MECHANISM, ORACLE):
            del sys.modules[name]


@pytest.mark.parametrize("subject", ["mixer", "stage"])
def test_it_keeps_the_laws_of_one_process(case, subject):
    for step in (CHUNK, 5):
        test_causality.test_outputs_before_a_changed_token_stay(case, subject, step)
    test_causality.test_a_memory_carries_a_change_across_the_chunk_border_and_nothing_else_does(case, subject)
    for layout in ("one_grid", "borders", "padded"):
        test_streaming.test_splits_agree(case, subject, layout)
    for layout in ("borders", "padded"):
        test_reset.test_a_document_equals_a_fresh_run(case, subject, layout, CHUNK)
    test_gradients.test_gradients_do_not_depend_on_the_calls(case, subject)


def test_it_equals_its_oracle_and_its_declarations(case):
    for layout in ("one_grid", "borders", "padded"):
        test_oracle.test_equals_the_naive_loop(case, layout)
    test_gradients.test_gradients_match_finite_differences(case, CHUNK + 3)
    for dtype in (torch.float64, torch.bfloat16):
        test_specs.test_states_match_their_declaration_at_every_chunk_border(case, 3, dtype)
    test_specs.test_a_call_leaves_its_input_state_as_it_was(case)


def test_its_flops_are_those_that_torch_counts(case):
    page = (ROOT / "docs" / "add_a_mechanism.md").read_text(encoding="utf-8")
    (line,) = re.findall(r'^    "moving average": (\{.*\}),$', page, flags=re.M)
    model = counted_flops.small_model(ast.literal_eval(line))
    parts = flops_by_part(model, counted_flops.CHUNKS * counted_flops.CHUNK, causal=False)
    forward, backward = counted_flops.counted(model)
    assert sum(part.forward for part in parts.values()) == pytest.approx(forward, rel=1e-9)
    assert sum(part.backward for part in parts.values()) == pytest.approx(backward, rel=1e-9)


def test_it_trains_and_is_planned(case):
    """Known to the configuration by its kind: a model of two layers learns to repeat a sequence."""
    model = case.model(layers=2, at=1).model_copy(update={"init_std": 0.1})
    assert model_state_bytes(model, 3, torch.float32, context_tokens=CHUNK)["memory"] == 3 * 16 * 4
    stage = build_stage(model, PlainLinears())
    initialize_parameters(stage, 1)
    optimizer = torch.optim.Adam(stage.parameters(), lr=1e-2)
    tokens = torch.arange(CHUNK + 1)[:, None].repeat(1, 3)
    losses = []
    for _ in range(40):
        states = stage.initial_states(3, torch.device("cpu"), torch.float32)
        hidden, _, _ = stage.read_chunk(tokens[:-1], states, Chunk((0,) * 3))
        loss = stage.token_losses(hidden, tokens[1:]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 10
