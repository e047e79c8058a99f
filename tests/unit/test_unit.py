"""Vectors of length one, against torch's own normalization."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megamem.ops.unit import unit


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)]
)
def test_values_and_gradients(dtype: torch.dtype, tolerance: float) -> None:
    """Rounding of the dtype, of numbers up to 1; a vector of zeros stays one."""
    x = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[0, 0] = 0.0
    weigh = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    x = x.to(dtype)
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    made, exact = unit(ours), F.normalize(theirs.double(), dim=-1)
    assert made.dtype is dtype
    assert (made - exact).abs().max() <= tolerance
    (made * weigh).sum().backward()
    (exact * weigh).sum().backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    # the gradient at zero is the slope of a division by the shortest length
    assert (ours.grad[0, 0] / theirs.grad[0, 0] - 1).abs().max() <= tolerance
    ours.grad[0, 0] = theirs.grad[0, 0] = 0.0
    assert (ours.grad - theirs.grad).abs().max() <= tolerance * theirs.grad.abs().max()


def test_gradients_by_differences() -> None:
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(unit, x)
