"""The kernels as functions of tensors: `write` and `through_writes` for networks of two matrices."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from megamem.ops.deep_memory.group_backward import ProductGradients, WriteGradients, Writing
from megamem.ops.deep_memory.group_forward import Network, Shares, Tokens, Written
from megamem.ops.deep_memory.network import Precision, Weights
from megamem.ops.deep_memory.triton import backward, forward
from megamem.ops.deep_memory.triton.blocks import Sizes

T = TypeVar("T")
LEAST = 16
"""The smallest side of a factor that tensor cores take."""
UNITS = 32
"""Inner units that are on the chip at a time."""
WARPS = 8
STAGES = 1
"""Blocks that are on their way at a time."""


def writing(precision: Precision) -> Writing:
    """Return both passes by the kernels."""
    return Writing(partial(write, precision), partial(through_writes, precision))


def write(
    precision: Precision, network: Network, tokens: Tokens, shares: Shares, weight: Tensor | None, first: Weights,
    momentum: Weights,
) -> tuple[Written, Weights, Weights]:  # fmt: skip
    """See `write` of `group_forward.py`."""
    rows, heads, count = tokens.key.shape[:3]
    tokens, shares = _contiguous(tokens), _contiguous(shares)
    key, value = tokens.key, tokens.value

    def series(x: Tensor) -> Tensor:
        """Return room for a matrix [B, H, out, in] as each inner chunk starts, the first one in place."""
        made = x.new_empty(rows, heads, count, *x.shape[2:])
        made[:, :, 0] = x
        return made

    hidden, back, active, slopes = (key.new_empty(*key.shape[:-1], first[0].shape[-2]) for _ in range(4))
    written = Written(
        tuple(map(series, first)), tuple(map(series, momentum)), hidden, back, torch.empty_like(key),
        (slopes, torch.empty_like(key)), (key, active),
    )  # fmt: skip
    last = forward.Last(tuple(map(_room, first)), tuple(map(_room, momentum)))
    forward.write_kernel[(rows * heads,)](
        forward.Given(key, value, _contiguous(weight), shares), written, last, heads, count,
        _sizes(network, tokens, first, precision), num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return written, last.weights, last.momentum


def through_writes(
    precision: Precision, network: Network, tokens: Tokens, shares: Shares, weight: Tensor | None, written: Written,
    reads: list[ProductGradients], of_weights: Weights, of_momentum: Weights,
) -> WriteGradients:  # fmt: skip
    """See `through_writes` of `group_backward.py`."""
    rows, heads, count = tokens.key.shape[:3]
    tokens, shares = _contiguous(tokens), _contiguous(shares)
    up, down = (_contiguous(backward.Reads(each.weights, each.momentum, each.inputs, each.change)) for each in reads)
    of_weight = None if weight is None or network.eps is None else weight.new_empty(rows, *weight.shape)
    of_shares = [None if each is None else _room(each) for each in shares[3:]]
    found = backward.Found(
        # what is added to: the gradients that were given are somebody else's
        tuple(map(_copy, of_weights)), tuple(map(_copy, of_momentum)), _room(tokens.key), _room(tokens.value),
        of_weight, *of_shares,  # type: ignore[arg-type]
    )  # fmt: skip
    backward.through_writes_kernel[(rows * heads,)](
        backward.Given(tokens.value, _contiguous(weight), shares, written, (up, down)), found, heads, count,
        _sizes(network, tokens, of_weights, precision), num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    of_weight = None if of_weight is None else of_weight.sum(0)
    return WriteGradients(found.weights, found.momentum, found.key, found.value, tuple(of_shares), of_weight)


def _sizes(network: Network, tokens: Tokens, weights: Weights, precision: Precision) -> Sizes:
    """Return the constants of kernels for `tokens` and networks of `weights` [B, H, out, in]."""
    count, width = tokens.key.shape[-2:]
    inner = weights[0].shape[-2]

    def block(size: int) -> int:
        """Return the power of two that holds so many."""
        return max(LEAST, triton.next_power_of_2(size))

    found: tuple[Any, ...] = (
        count, width, inner, tokens.query.shape[-2] // count, block(count), block(width), min(UNITS, block(inner)),
        network.loss == "l2", network.residual, network.eps, precision,
    )  # fmt: skip
    return Sizes(*(None if each is None else tl.constexpr(each) for each in found))


def _room(x: Tensor) -> Tensor:
    """Return room for a tensor like x [...]."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _copy(x: Tensor) -> Tensor:
    """Return a copy of x [...]."""
    return x.clone(memory_format=torch.contiguous_format)


def _contiguous(given: T) -> T:
    """Return tensors [...], in tuples or not, in the order of their memory, which the kernels go by."""
    if isinstance(given, Tensor):
        return given.contiguous()  # type: ignore[return-value]
    if isinstance(given, tuple):
        parts = [_contiguous(each) for each in given]
        return type(given)(*parts) if hasattr(given, "_fields") else type(given)(parts)
    return given
