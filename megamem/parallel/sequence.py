"""Sequence parallelism: tokens split over tensor-parallel ranks outside of the parallel regions.

Megatron-Core has these mappings too, but allocates their outputs on `torch.cuda.current_device()`; these run on any
backend with `all_gather_into_tensor` and `reduce_scatter_tensor` (NCCL and gloo).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def _gather(x: Tensor, group: ProcessGroup) -> Tensor:
    """Gather all ranks' x [tokens / ranks, ...] into [tokens, ...]."""
    out = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def _check_divisible(x: Tensor, group: ProcessGroup) -> None:
    """Raise ValueError unless the ranks divide the tokens of x [tokens, ...]."""
    if x.shape[0] % group.size():
        raise ValueError(f"sequence parallelism: {x.shape[0]} tokens cannot be split over {group.size()} ranks")


def _reduce_scatter(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum all ranks' x [tokens, ...] and keep this rank's [tokens / ranks, ...]."""
    _check_divisible(x, group)
    out = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        """See `gather_tokens`; x: [tokens, ...]."""
        ctx.group = group
        return _gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """See `gather_tokens`; grad: [tokens, ...] like its output."""
        return _reduce_scatter(grad, ctx.group), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        """See `reduce_scatter_tokens`; x: [tokens, ...]."""
        ctx.group = group
        return _reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """See `reduce_scatter_tokens`; grad: [tokens, ...] like its output."""
        return _gather(grad, ctx.group), None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        """See `split_tokens`; x: [tokens, ...]."""
        ctx.group = group
        _check_divisible(x, group)
        return x.chunk(group.size())[group.rank()].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """See `split_tokens`; grad: [tokens, ...] like its output."""
        return _gather(grad, ctx.group), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        """See `join_tokens`; x: [tokens, ...]."""
        ctx.group = group
        return _gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """See `join_tokens`; grad: [tokens, ...] like its output."""
        return grad.chunk(ctx.group.size())[ctx.group.rank()].contiguous(), None


def join_tokens(x: Tensor, group: ProcessGroup) -> Tensor:
    """[tokens / ranks, ...] -> [tokens, ...] for work that every rank does alike; the backward splits."""
    out: Tensor = _Join.apply(x, group)
    return out


def gather_tokens(x: Tensor, group: ProcessGroup) -> Tensor:
    """[tokens / ranks, ...] -> [tokens, ...]; the backward reduce-scatters."""
    out: Tensor = _Gather.apply(x, group)
    return out


def reduce_scatter_tokens(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum partial [tokens, ...] over ranks, each keeping [tokens / ranks, ...]; the backward gathers.

    Raises: ValueError if the ranks do not divide the tokens.
    """
    out: Tensor = _ReduceScatter.apply(x, group)
    return out


def split_tokens(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return this rank's [tokens / ranks, ...] of a replicated [tokens, ...]; the backward gathers.

    Raises: ValueError if the ranks do not divide the tokens.
    """
    out: Tensor = _Split.apply(x, group)
    return out
