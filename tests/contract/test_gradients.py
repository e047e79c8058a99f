"""Law 6: gradients of one call against finite differences, and gradients through a chain of calls."""

from functools import partial

import pytest
import torch

from megamem.memory.base import Chunk, Growing, detach, map_state, state_tensors
from tests.contract.case import CHUNK
from tests.contract.driver import every, has_memory, inputs, largest, make, one_grid, run, within

TINY = {"heads": 2, "head_dim": 2, "norm_eps": 0.1}
"""A layer norm over two channels is a step as wide as the root of its epsilon, too steep for differences of 1e-6."""


def with_tensors(state, tensors):
    """The state with its tensors replaced, in order."""
    left = iter(tensors)
    return map_state(lambda _: next(left), state)


@pytest.mark.parametrize(
    "seen",
    [
        pytest.param(CHUNK, id="at_a_border"),
        pytest.param(CHUNK + 3, id="inside_a_chunk"),
        pytest.param(2 * CHUNK, id="third_chunk", marks=pytest.mark.slow),
    ],
)
def test_gradients_match_finite_differences(case, seen):
    """With respect to the input, the incoming state and every parameter; the call runs across a chunk border.

    A loss that trains one submodule alone is compared for that submodule's parameters, and reaches no others.
    """
    mixer = make(case, "mixer", **TINY).mixer
    x = torch.randn(seen + CHUNK, 1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    state = mixer.initial_state(1, x.device, x.dtype)
    for begin, end in ((0, CHUNK), (CHUNK, 2 * CHUNK)):
        if begin < min(end, seen):
            state = detach(mixer(x[begin : min(end, seen)], state, Chunk((begin,)))[1])
    names = [name for name, _ in mixer.named_parameters()]
    arguments = [x[seen:], *state_tensors(state), *mixer.parameters()]
    arguments = [argument.detach().clone() for argument in arguments]
    states = range(1, len(arguments) - len(names))
    for i, argument in enumerate(arguments):
        argument.requires_grad_(argument.is_floating_point() and (i not in states or mixer.differentiable_state))

    def call(*arguments):
        before = with_tensors(state, [arguments[i] for i in states])
        weights = dict(zip(names, arguments[states.stop :], strict=True))
        return torch.func.functional_call(mixer, weights, (arguments[0], before, Chunk((seen,))))

    def outputs(*arguments):
        hidden, after, losses = call(*arguments)
        new = [t for t in state_tensors(after) if t.requires_grad and t.numel()]
        return (hidden, *new, *(losses[name] for name in sorted(losses.keys() - mixer.trained_by.keys())))

    # central differences of step 1e-6 in float64 are good to about 1e-9 here; a missing term shows as 1e-2 and more
    assert torch.autograd.gradcheck(outputs, arguments, eps=1e-6, atol=1e-7, rtol=1e-6)
    for loss, module in mixer.trained_by.items():
        if loss not in call(*arguments)[2]:
            continue
        own = {states.stop + i for i, name in enumerate(names) if name.startswith(f"{module}.")}
        value = call(*arguments)[2][loss]
        wanted = [argument for argument in arguments if argument.requires_grad]
        grads = iter(torch.autograd.grad(value, wanted, allow_unused=True))
        for i, argument in enumerate(arguments):
            if argument.requires_grad:
                grad = next(grads)
                assert i in own or grad is None or not grad.any(), names[i - states.stop]
        fixed = [a if i in own else a.detach() for i, a in enumerate(arguments)]
        term = partial(lambda name, *a: call(*a)[2][name], loss)
        assert torch.autograd.gradcheck(term, fixed, eps=1e-6, atol=1e-7, rtol=1e-6)


def test_gradients_reach_across_a_chunk_border_as_declared(case):
    """Through the state if the mixer says that it is differentiable and has one, else not at all."""
    subject = make(case, "mixer")
    x = inputs(subject, 2 * CHUNK, 1).requires_grad_()
    output = run(subject, x, one_grid(1), [CHUNK])[0]
    (grad,) = torch.autograd.grad(output[CHUNK:].square().sum(), x)
    reach = largest(grad[:CHUNK])
    mixer = subject.mixer
    if has_memory(mixer) and mixer.differentiable_state:
        assert reach > 1e-6
    else:
        assert reach == 0.0


def test_gradients_do_not_depend_on_the_calls(case, subject):
    """Chunk calls, odd calls and one call, backward through all of them: the same gradient of every parameter."""
    if not all(getattr(part, "differentiable_state", True) for part in make(case, subject).components.values()):
        return  # where gradients stop at the incoming state, calls decide what they see
    found = []
    for cuts in (every(CHUNK, 3 * CHUNK), [1, 5, 12, 19], every(1, 3 * CHUNK), [3 * CHUNK]):
        made = make(case, subject)
        output = run(made, inputs(made, 3 * CHUNK, 2), one_grid(2), cuts)[0]
        probe = torch.randn(output.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        (output * probe).sum().backward()
        found.append({name: p.grad for name, p in made.named_parameters() if p.grad is not None})
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for name, grad in found[0].items():
            # float64 sums over 48 tokens in another order
            within("6 gradients over calls", largest(other[name] - grad) / largest(grad), 1e-12)


def test_a_row_alone_has_half_the_gradients_of_two_like_it(case, subject):
    """How many rows a call has decides how tensors lie in memory, and what is written in place where."""
    found = []
    for rows in (1, 2):
        made = make(case, subject)
        x = inputs(made, 3 * CHUNK, 1).expand(-1, rows, *[-1] * (inputs(made, 1, 1).ndim - 2)).clone()
        output = run(made, x, one_grid(rows), every(CHUNK, 3 * CHUNK))[0]
        probe = torch.randn(output[:, :1].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        (output * probe).sum().backward()
        found.append({name: p.grad / rows for name, p in made.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name, grad in found[0].items():
        # float64 sums over 48 tokens, of which BLAS forms other blocks
        within("6 gradients of a row alone", largest(found[1][name] - grad) / largest(grad), 1e-12)


@pytest.mark.whole_model
def test_recomputing_layers_in_the_backward_changes_nothing(case):
    """Activation checkpointing of layers or parts of them: outputs, states and gradients bit for bit."""
    found = []
    for recompute in (False, True, "mixer", "mlp"):
        stage = make(case, "stage")
        stage.recompute = recompute
        x = inputs(stage, 3 * CHUNK, 2)
        output, states, auxiliary = run(stage, x, one_grid(2), every(CHUNK, 3 * CHUNK))
        (stage.token_losses(output, x).sum() + sum(auxiliary.values())).backward()
        found.append((output, list(state_tensors(states)), [p.grad for p in stage.parameters()]))
    (a, states_a, grads_a), *others = found
    for b, states_b, grads_b in others:
        assert torch.equal(a, b)
        assert all(torch.equal(s, t) for s, t in zip(states_a, states_b, strict=True))
        assert all(torch.equal(s, t) for s, t in zip(grads_a, grads_b, strict=True))


def test_cutting_the_graph_cuts_every_tensor_of_the_state(case):
    """What happens at a window's border: same structure, no gradient, growing lists included."""
    subject = make(case, "mixer")
    cut = detach(run(subject, inputs(subject, 2 * CHUNK, 1), one_grid(1), [CHUNK])[1]["layers.0"])
    assert not any(tensor.requires_grad for tensor in state_tensors(cut))
    for name, spec in subject.mixer.specs.items():
        assert isinstance(cut[name], list) == isinstance(spec, Growing)
