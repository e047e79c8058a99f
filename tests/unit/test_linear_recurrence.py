"""The recurrences in matrix products against the token-by-token loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megamem.ops.linear_recurrence.torch import linear_recurrence

BATCH, HEADS, GROUPS, KEYS, VALUES = 2, 2, 2, 5, 7
FORMS = {"additive": (False, False), "decay": (True, False), "delta": (False, True), "gated delta": (True, True)}


def drawn(tokens: int, decay: bool, rate: bool, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    inputs = {
        "query": normal(BATCH, HEADS, GROUPS, tokens, KEYS),
        "key": torch.nn.functional.normalize(normal(BATCH, HEADS, tokens, KEYS), dim=-1),
        "value": normal(BATCH, HEADS, tokens, VALUES),
        "state": normal(BATCH, HEADS, KEYS, VALUES),
    }
    if decay:
        inputs["log_decay"] = -torch.rand(BATCH, HEADS, tokens, dtype=torch.float64, generator=generator)
    if rate:
        inputs["rate"] = torch.rand(BATCH, HEADS, tokens, dtype=torch.float64, generator=generator)
    return inputs


def loop(query, key, value, state, log_decay=None, rate=None, resets=()):
    """S_t = a S + k w^T, one token at a time."""
    outputs = []
    for t in range(key.shape[2]):
        if any(t in row for row in resets):
            state = state * torch.tensor([t not in row for row in resets], dtype=state.dtype)[:, None, None, None]
        if log_decay is not None:
            state = log_decay[:, :, t, None, None].exp() * state
        new = value[:, :, t]
        if rate is not None:
            new = rate[:, :, t, None] * (new - (key[:, :, t, :, None] * state).sum(2))
        state = state + key[:, :, t, :, None] * new[:, :, None]
        outputs.append((query[:, :, :, t, :, None] * state[:, :, None]).sum(3))
    return torch.stack(outputs, dim=3), state


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("inner", [1, 3, 16, 64])
def test_inner_chunks_and_calls_change_nothing(form: str, inner: int) -> None:
    """1e-9: 819 steps of a recurrence whose norm stays of the order of its inputs."""
    inputs = drawn(819, *FORMS[form])
    exact, last = loop(**inputs)
    state, outputs, begin = inputs.pop("state"), [], 0
    for tokens in (63, 500, 256):
        part = {name: x[..., begin : begin + tokens] if name in ("log_decay", "rate") else
                x[..., begin : begin + tokens, :] for name, x in inputs.items()}  # fmt: skip
        output, state = linear_recurrence(**part, state=state, inner=inner)
        outputs.append(output)
        begin += tokens
    torch.testing.assert_close(torch.cat(outputs, dim=3), exact, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(state, last, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_the_loop_s(form: str) -> None:
    inputs = {name: x.requires_grad_() for name, x in drawn(21, *FORMS[form]).items()}
    weights = torch.randn(BATCH, HEADS, GROUPS, 21, VALUES, dtype=torch.float64)

    def gradients(answer: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        output, state = answer
        return torch.autograd.grad((output * weights).sum() + state.square().sum(), list(inputs.values()))

    for ours, theirs in zip(gradients(linear_recurrence(**inputs, inner=8)), gradients(loop(**inputs)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)


def test_decays_that_underflow_leave_no_nan() -> None:
    """e^-100 a token: the product over 64 tokens is zero in float64, the ratio of neighbours is not."""
    inputs = drawn(64, True, True)
    inputs["log_decay"] = torch.full_like(inputs["log_decay"], -100.0).requires_grad_()
    output, state = linear_recurrence(**inputs, inner=64)
    exact, _ = loop(**inputs)
    torch.testing.assert_close(output, exact, rtol=1e-10, atol=1e-12)
    (output.sum() + state.sum()).backward()
    assert inputs["log_decay"].grad.isfinite().all()


@pytest.mark.parametrize("form", ["decay", "gated delta"])
def test_bfloat16_inputs_do_not_drift(form: str) -> None:
    """Inputs are rounded to 2^-9; the recurrence runs in float32 and adds nothing that grows along 64 chunks."""
    exact_inputs = drawn(64 * 16, *FORMS[form])
    inputs = {
        name: x.bfloat16() if name in ("query", "key", "value") else x.float() for name, x in exact_inputs.items()
    }
    exact, _ = loop(**{name: x.double() for name, x in inputs.items()})
    output, state = linear_recurrence(**inputs, inner=16)
    assert output.dtype == state.dtype == torch.float32

    def sizes(x: Tensor) -> Tensor:
        return x.movedim(3, 0).reshape(64, -1).norm(dim=1)

    assert (sizes(output.double() - exact) / sizes(exact)).max() < 1e-5


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("inner", [1, 8, 64])
def test_resets_begin_with_a_matrix_of_zeros(form: str, inner: int) -> None:
    """Anywhere: several within an inner chunk, first and last token; gradients too. 1e-12: sums in other orders."""
    inputs, resets = drawn(70, *FORMS[form], seed=3), ((0, 3, 5, 64), (9, 69))
    found = []
    for recurrence, options in ((linear_recurrence, {"inner": inner}), (loop, {})):
        leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        output, last = recurrence(**leaves, resets=resets, **options)
        found.append([output, last, *torch.autograd.grad(output.sin().sum() + last.cos().sum(), list(leaves.values()))])
    for ours, exact in zip(*found, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)
    assert found[0][2 + list(inputs).index("state")][0].abs().max() == 0.0  # row 0 is reset before it reads anything
