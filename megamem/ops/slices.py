"""Slices of one tensor, which may overlap, whose gradients are added up where they belong.

The gradient of a slice by itself is zeros as long as the tensor that it was taken from, so that the slices of a long
call, one for each block, would move the square of its length on the way back. Here all are added into one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class _Slices(torch.autograd.Function):
    """Views of a tensor; backward adds their gradients into one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *places: slice) -> tuple[Tensor, ...]:
        """Return the slices of x [tokens, ...]."""
        ctx.shape, ctx.places = x.shape, places
        ctx.set_materialize_grads(False)
        return tuple(x[place] for place in places)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradient of x, like x [tokens, ...], from those of the slices."""
        total: Tensor | None = None
        for place, gradient in zip(ctx.places, gradients, strict=True):
            if gradient is not None:
                total = gradient.new_zeros(ctx.shape) if total is None else total
                total[place] += gradient
        return total, *(None for _ in ctx.places)


def slices(x: Tensor, places: Sequence[slice]) -> tuple[Tensor, ...]:
    """Return x[place] for each place, x [tokens, ...]; not to be changed in place."""
    if len(places) == 1:
        return (x[places[0]],)
    return tuple(_Slices.apply(x, *places))
