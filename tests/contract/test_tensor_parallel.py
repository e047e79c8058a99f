"""Law 3: on 1, 2 and 4 real processes, with tokens whole or split, everything equals one process with plain layers."""

from functools import cache

import pytest
import torch

from megamem.memory.base import Growing
from tests.contract.cases import PATIENCE_S
from tests.contract.driver import largest, within
from tests.contract.observe import HEADS, TP_SIZES, joined, plain, splits
from tests.distributed.harness import WorldError, run_distributed

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(PATIENCE_S + 120)]

# float64: the ranks' partial sums are added in another order
TOLERANCE = 1e-12
# Megatron's vocabulary-parallel cross-entropy computes in float32 (unit roundoff 6e-8) whatever the logits are
LOSS_TOLERANCE = 1e-6

LAYOUTS = [(1, "whole"), (2, "whole"), (2, "split"), (4, "whole"), (4, "split")]
reference = cache(plain)


@cache
def run_world():
    """Every observation on every rank, or the error: a world that fails is not started again by each test."""
    try:
        return run_distributed(max(TP_SIZES), "tests.contract.observe:world", timeout_s=PATIENCE_S)
    except WorldError as error:
        return error


@pytest.fixture(scope="session")
def observations():
    """The parts of an observation, in the order of tensor-parallel ranks: observations(tp, case, subject, mode)."""
    ranks = run_world()
    if isinstance(ranks, WorldError):
        raise ranks

    def parts(tp, case, subject, mode):
        key = f"{tp}/{case.id}/{subject}/{mode}"
        found = [rank[key] for rank in ranks if key in rank]
        assert len(found) == tp
        return found

    return parts


@pytest.fixture(params=LAYOUTS, ids=lambda layout: f"tp{layout[0]}-{layout[1]}")
def layout(request, case):
    """Tensor-parallel size and mode; whole where the case's rows cannot be split over so many ranks."""
    tp, mode = request.param
    return (tp, mode) if splits(case, tp, mode == "split") else (tp, "whole")


@pytest.fixture
def ranks(observations, layout, case, subject):
    """The observations of all ranks, and the reference."""
    tp, mode = layout
    return observations(tp, case, subject, mode), reference(case, subject)


def relative(ours, theirs):
    """Largest difference over the largest entry."""
    assert ours.shape == theirs.shape
    return largest(ours - theirs) / max(largest(theirs), 1e-3)


def test_outputs_agree(ranks, layout):
    ours, expected = ranks
    split = layout[1] == "split"
    for call, theirs in enumerate(expected["outputs"]):
        whole = joined([rank["outputs"][call] for rank in ours], 0 if split else None)
        within("3 TP: outputs", relative(whole, theirs), TOLERANCE)


def test_losses_agree(ranks):
    ours, expected = ranks
    for name in expected["auxiliary"]:
        whole = joined([rank["auxiliary"][name] for rank in ours], None)
        within("3 TP: auxiliary losses", relative(whole, expected["auxiliary"][name]), TOLERANCE)
    if "losses" in expected:
        whole = joined([rank["losses"] for rank in ours], None)
        within("3 TP: token losses", relative(whole.double(), expected["losses"]), LOSS_TOLERANCE)


def test_every_gradient_agrees(ranks):
    ours, expected = ranks
    kinds = [("grads", "3 TP: gradients", TOLERANCE)]
    if "losses" in expected:
        kinds.append(("loss_grads", "3 TP: gradients of token losses", LOSS_TOLERANCE))
    for kind, law, tolerance in kinds:
        assert all(rank[kind].keys() == expected[kind].keys() for rank in ours)
        for name, (theirs, axis) in expected[kind].items():
            assert largest(theirs) > 0, f"{name} has no gradient: the comparison would be empty"
            whole = joined([rank[kind][name][0] for rank in ours], axis)
            within(law, relative(whole, theirs), tolerance)
    if "input_grad" in expected:
        whole = joined([rank["input_grad"] for rank in ours], None)
        within("3 TP: gradients", relative(whole, expected["input_grad"]), TOLERANCE)


def gathered(specs, states):
    """One whole state from the ranks' parts, by the declared shard axes."""
    whole = {}
    for name, spec in specs.items():
        parts = [state[name] for state in states]
        if isinstance(spec, Growing):
            whole[name] = [gathered(spec.entry, entries) for entries in zip(*parts, strict=True)]
        else:
            whole[name] = joined(parts, spec.axis(spec.shard) if spec.shard else None)
    return whole


def tensors(specs, state):
    """(spec, tensor) of a whole state."""
    for name, spec in specs.items():
        if isinstance(spec, Growing):
            for entry in state[name]:
                yield from tensors(spec.entry, entry)
        else:
            yield spec, state[name]


def test_gathered_states_agree(observations, layout, case, subject):
    tp, mode = layout
    ours, expected = observations(tp, case, subject, mode), reference(case, subject)
    model = case.model(heads=HEADS) if subject == "mixer" else case.model(layers=3, at=1, heads=HEADS)
    for name, specs in model.component_specs().items():
        theirs = expected["states"][name]
        whole = gathered(specs, [rank["states"][name] for rank in ours])
        for (_, a), (_, b) in zip(tensors(specs, whole), tensors(specs, theirs), strict=True):
            within("3 TP: states", relative(a, b), TOLERANCE)


@pytest.mark.parametrize("tp", TP_SIZES)
def test_local_states_have_the_declared_shapes(observations, tp, case):
    """Law 8 under tensor parallelism."""
    model = case.model(heads=HEADS)
    specs = model.mixer_at(0).state_specs(model)
    names = {"batch": 2, "heads": model.heads, "kv_heads": model.resolved_kv_heads, "hidden": model.hidden_size}
    names |= {"chunk": model.chunk_size, "open": 0}
    for rank in observations(tp, case, "mixer", "whole"):
        for spec, tensor in tensors(specs, rank["states"]["layers.0"]):
            assert tuple(tensor.shape) == spec.sizes(names, tp)
            assert tensor.dtype == spec.torch_dtype(torch.float64)
