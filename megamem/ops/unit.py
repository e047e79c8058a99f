"""Vectors of length one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SHORTEST = 1e-12
"""What shorter vectors are divided by, so that zeros stay zeros."""


def unit(x: Tensor) -> Tensor:
    """Return x / |x| over the last axis of x [..., width], in the dtype of x.

    The length is computed in float32, that of float64 in float64.
    """
    out: Tensor = _Unit.apply(x)
    return out


class _Unit(torch.autograd.Function):
    """n = x / |x|. With _n for the gradient at n: _x = (_n - n (n . _n)) / |x|."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return n, like x [..., width]."""
        exact = _exact(x)
        inverse = torch.linalg.vector_norm(exact, dim=-1, keepdim=True).clamp_min(SHORTEST).reciprocal()
        ctx.save_for_backward(x, inverse)
        return (exact * inverse).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Return the gradient of x from that of n, [..., width]."""
        x, inverse = ctx.saved_tensors
        given, made = _exact(gradients[0]), _exact(x) * inverse
        along = (given * made).sum(-1, keepdim=True)
        return (torch.addcmul(given, made, along, value=-1) * inverse).to(x.dtype)


def _exact(x: Tensor) -> Tensor:
    """Return x [...] in float32, or in float64 where it is that."""
    return x if x.dtype == torch.float64 else x.float()
