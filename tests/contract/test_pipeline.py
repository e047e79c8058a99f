"""Law 4: on 1, 2 and 4 real stages, with windows of 1, 2 and all chunks, everything equals one autograd graph."""

from functools import cache

import pytest
from torch import Tensor

from megamem.memory.base import state_tensors
from tests.contract.cases import PATIENCE_S
from tests.contract.driver import largest, within
from tests.contract.stages import STAGES, WINDOWS, model_of, one_graph, world
from tests.distributed.harness import WorldError, run_distributed

pytestmark = [pytest.mark.whole_model, pytest.mark.distributed, pytest.mark.timeout(PATIENCE_S + 120)]

# float64: the sum over units is taken in another order
TOLERANCE = 1e-12
reference = cache(one_graph)


@cache
def run_world():
    """Every rank's results, or the error: a world that fails is not started again by each test."""
    try:
        return run_distributed(max(STAGES), f"{world.__module__}:{world.__name__}", timeout_s=PATIENCE_S)
    except WorldError as error:
        return error


@pytest.fixture(params=WINDOWS, ids=lambda window: f"bptt{window}")
def window(request):
    return request.param


@pytest.fixture(params=STAGES, ids=lambda stages: f"pp{stages}")
def stages(request, case, window):
    """What each stage found, first to last, and the reference."""
    ranks = run_world()
    if isinstance(ranks, WorldError):
        raise ranks
    key = f"{request.param}/{case.id}/{window}"
    found = [rank[key] for rank in ranks if key in rank]
    assert len(found) == request.param
    return found, reference(case, window)


def needed_window(case):
    """Chunks of the shortest window in which every parameter gets a gradient."""
    model = model_of(case)
    return max(model.architecture.training_window(model), model.mixer_at(0).training_window(model.layer_model(0)))


def test_every_gradient_is_that_of_one_graph(stages, case, window):
    found, expected = stages
    grads: dict[str, Tensor | None] = {}
    for stage in found:
        for name, grad in stage["grads"].items():
            # what several stages hold has a part of its gradient on each
            earlier = grads.get(name)
            grads[name] = grad if earlier is None else earlier + grad
    assert grads.keys() == expected["grads"].keys()
    for name, exact in expected["grads"].items():
        if exact is None:  # a memory is written for a chunk beyond the window; on another stage it has zeros
            assert grads[name] is None or largest(grads[name]) == 0.0
            continue
        if window < needed_window(case) and largest(exact) == 0.0:  # its rows go up beside the chunk: nobody reads them
            assert largest(grads[name]) == 0.0
            continue
        assert largest(exact) > 0, f"{name} has no gradient: the comparison would be empty"
        within("4 PP: gradients", largest(grads[name] - exact) / largest(exact), TOLERANCE)


def test_every_parameter_has_a_gradient_in_the_windows_declared_for_it(case, window):
    if window >= needed_window(case):
        assert all(grad is not None for grad in reference(case, window)["grads"].values())


def test_loss_and_states_agree(stages, case):
    found, expected = stages
    assert [stage["nats"] for stage in found[:-1]] == [0.0] * (len(found) - 1)
    within("4 PP: loss", abs(found[-1]["nats"] / expected["nats"] - 1), TOLERANCE)
    for sequence, theirs in enumerate(expected["states"]):
        ours = {name: state for stage in found for name, state in stage["states"][sequence].items()}
        assert ours.keys() == theirs.keys()
        assert ours.keys() == model_of(case).component_specs().keys()
        for name in ours:
            for a, b in zip(state_tensors(ours[name]), state_tensors(theirs[name]), strict=True):
                within("4 PP: states", largest(a - b) / max(largest(b), 1e-3), TOLERANCE)


def test_no_more_units_are_held_than_the_formula_says(stages):
    for stage in stages[0]:
        assert stage["peak"] == stage["formula"]
