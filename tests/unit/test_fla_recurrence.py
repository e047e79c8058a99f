"""The layout in which flash-linear-attention is called: its functions stood in for by loops over its own axes."""

import sys
from collections.abc import Sequence
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from torch import Tensor

from megamem.errors import ConfigError
from megamem.ops.linear_recurrence.fla import check_recurrence, fla_recurrence
from megamem.ops.linear_recurrence.torch import linear_recurrence


def loop(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, *, scale: float, initial_state: Tensor,
    output_final_state: bool, cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The package's documentation, token by token: q, k, v [batch, tokens, heads, width], g and beta [..., heads].

    cu_seqlens [series + 1]: where the series begin that stand behind one another in a single row; a state for each.
    """
    assert output_final_state
    if cu_seqlens is not None:
        assert q.shape[0] == 1
        assert len(initial_state) == len(cu_seqlens) - 1
        found = []
        for number, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
            own = [None if x is None else x[:, begin:end] for x in (q, k, v, g, beta)]
            state = initial_state[number : number + 1]
            found.append(loop(*own, scale=scale, initial_state=state, output_final_state=True))
        reads, states = zip(*found, strict=True)
        return torch.cat(reads, 1), torch.cat(states)
    assert q.dtype == k.dtype == v.dtype, "the kernels take one dtype"
    q, k, v = (x.to(initial_state.dtype) for x in (q, k, v))
    state, outputs = initial_state, []
    for t in range(q.shape[1]):
        if g is not None:
            state = g[:, t, :, None, None].exp() * state
        new = v[:, t]
        if beta is not None:
            new = beta[:, t, :, None] * (new - torch.einsum("bhk,bhkv->bhv", k[:, t], state))
        state = state + k[:, t, :, :, None] * new[:, :, None]
        outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outputs, 1), state


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = {
        "simple_gla": ("chunk_simple_gla", lambda q, k, v, g, **rest: loop(q, k, v, g, None, **rest)),
        "delta_rule": ("chunk_delta_rule", lambda q, k, v, beta, **rest: loop(q, k, v, None, beta, **rest)),
        "gated_delta_rule": ("chunk_gated_delta_rule", loop),
    }
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, (function, made) in functions.items():
        module = ModuleType(f"fla.ops.{name}")
        setattr(module, function, made)
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.parametrize("resets", [(), ((2, 3), ()), ((), (1, 6))])
@pytest.mark.parametrize("rate", [False, True])
@pytest.mark.parametrize("decay", [None, 1, 2])
def test_agrees_with_the_recurrence(decay: int | None, rate: bool, resets: Sequence[Sequence[int]]) -> None:
    """Values, state and gradients in float64; decays of one row stand for all rows, resets are those of each."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    given = {"query": normal(2, 3, 2, 7, 4), "key": normal(2, 3, 7, 4) / 2, "value": normal(2, 3, 7, 5)}
    given["state"] = normal(2, 3, 4, 5)
    if decay is not None:
        given["log_decay"] = -normal(decay, 3, 7).abs()
    if rate:
        given["rate"] = normal(2, 3, 7).sigmoid()
    found = []
    for recurrence in (fla_recurrence, linear_recurrence):
        leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
        read, after = recurrence(**leaves, resets=resets)
        grads = torch.autograd.grad(read.sin().sum() + after.cos().sum(), list(leaves.values()))
        found.append((read, after, *grads))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)  # sums of some ten terms in other orders


def test_values_in_the_states_dtype_are_taken() -> None:
    """SSD multiplies them by its step in FP32; the kernels get the keys' dtype, and answers come in the state's."""
    x = torch.randn(1, 2, 1, 6, 4, generator=torch.Generator().manual_seed(1))
    key, value, state = x[:, :, 0].bfloat16(), x[:, :, 0].float(), torch.zeros(1, 2, 4, 4)
    read, after = fla_recurrence(x.bfloat16(), key, value, state)
    assert read.dtype == after.dtype == torch.float32
    exact, _ = linear_recurrence(x.bfloat16(), key, value.bfloat16(), state)
    torch.testing.assert_close(read, exact, rtol=1e-5, atol=1e-5)  # both sum in FP32


def test_what_cannot_run_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    check_recurrence("torch")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"model.recurrence_kernel: fla is not installed"):
        check_recurrence("fla")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"model.recurrence_kernel: fla needs a CUDA device; choose torch"):
        check_recurrence("fla")
