"""Short convolutions against a loop over tokens, and their backward pass by hand against autograd's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megamem.ops.short_convolution import short_convolution

TOKENS, BATCH, HEADS, WIDTH = 9, 2, 3, 4


def drawn(taps: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(taps)
    joined = torch.randn(taps - 1 + TOKENS, BATCH, HEADS, WIDTH, dtype=torch.float64, generator=generator)
    weight = torch.randn(HEADS, WIDTH, taps, dtype=torch.float64, generator=generator)
    return joined.requires_grad_(), weight.requires_grad_()


def loop(joined: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The equation, one token at a time."""
    taps = weight.shape[-1]
    sums = [sum(weight[..., j] * joined[t + j] for j in range(taps)) for t in range(TOKENS)]
    return F.silu(torch.stack(sums)), joined[TOKENS:]


@pytest.mark.parametrize("taps", [2, 3, 4, 12])
def test_outputs_and_gradients_are_those_of_the_loop(taps: int) -> None:
    """Rounding alone: sums of at most twelve numbers. Twelve taps: more than there are tokens."""
    given = drawn(taps)
    outputs, expected = short_convolution(*given), loop(*given)
    weights = [torch.randn_like(x) for x in expected]
    found = torch.autograd.grad(outputs, given, weights)
    for ours, theirs in zip(
        (*outputs, *found), (*expected, *torch.autograd.grad(expected, given, weights)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_compiled_it_is_the_same() -> None:
    """The form that the compiler gets has a backward pass of its own, autograd's."""
    torch._dynamo.reset()
    given = drawn(4)
    compiled = torch.compile(short_convolution, backend="aot_eager")
    outputs, expected = compiled(*given), short_convolution(*given)
    found, wanted = (torch.autograd.grad([x.sum() for x in each], given) for each in (outputs, expected))
    for ours, theirs in zip((*outputs, *found), (*expected, *wanted), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    torch._dynamo.reset()


def test_a_frozen_filter_has_no_gradient() -> None:
    joined, weight = drawn(4)
    out, _ = short_convolution(joined, weight.detach())
    out.sum().backward()
    assert joined.grad is not None
