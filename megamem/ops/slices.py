"""Slices and parts of one tensor, whose gradients go where they belong without passes of their own.

The gradient of a slice by itself is zeros as long as the tensor that it was taken from, so that the slices of a long
call, one for each block, would move the square of its length on the way back. Here all are added into one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


def parts(x: Tensor, sizes: Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    """Split x [...] into parts of such sizes along a dimension.

    A single part is x itself: the gradient of a split is a copy, of one into a single part too.
    """
    return tuple(x.split(list(sizes), dim)) if len(sizes) > 1 else (x,)


def groups(given: Sequence[Tensor | None], size: int, dim: int) -> Iterator[tuple[Tensor | None, ...]]:
    """Yield what tensors [...] of one length have along a dimension, so much at a time; None stays None.

    The last group may be smaller.
    """
    length = next(x.shape[dim] for x in given if x is not None)
    sizes = [min(size, length - begin) for begin in range(0, length, size)]
    yield from zip(*([None] * len(sizes) if x is None else parts(x, sizes, dim) for x in given), strict=True)


def slices(x: Tensor, places: Sequence[slice]) -> tuple[Tensor, ...]:
    """Return x[place] for each place, x [tokens, ...]; not to be changed in place."""
    if len(places) == 1:
        return (x[places[0]],)
    return tuple(_Slices.apply(x, *places))
