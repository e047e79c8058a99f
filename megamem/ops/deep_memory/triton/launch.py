"""The kernels as functions of tensors: both passes of a group of inner chunks, for networks of two matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from megamem.ops.deep_memory import shared_heads
from megamem.ops.deep_memory.group_backward import GroupPasses, ReadGradients, Reads, WriteGradients, shared_factors
from megamem.ops.deep_memory.group_forward import OF_QUERIES, Network, Shares, Tokens, Written
from megamem.ops.deep_memory.network import Precision, Weights
from megamem.ops.deep_memory.triton import reads, writes, writes_backward
from megamem.ops.deep_memory.triton.blocks import Sizes
from megamem.ops.deep_memory.triton.meeting import Meeting

T = TypeVar("T")
LEAST = 16
"""The smallest side of a factor that tensor cores take."""
WARPS = 8
STAGES = 1
"""Blocks that are on their way at a time."""


def passes(precision: Precision) -> GroupPasses:
    """Return both passes by the kernels."""
    return GroupPasses(
        partial(write, precision), partial(read, precision), partial(through_reads, precision),
        partial(through_writes, precision),
    )  # fmt: skip


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
    last = writes.Last(tuple(map(_room, first)), tuple(map(_room, momentum)))
    given = writes.Given(key, value, _contiguous(weight), shares)
    sizes = _sizes(network, tokens.query, key, first, precision, shared_heads.parts_of(key, first[0].shape[-2]))
    _in_turns(writes.write_kernel, (given, written, last), key, sizes)
    return written, last.weights, last.momentum


def read(precision: Precision, network: Network, query: Tensor, shares: Shares, written: Written) -> Tensor:
    """See `read` of `group_forward.py`."""
    answered = _room(query)
    grid, sizes, given = _reading(precision, network, query, shares, written)
    reads.read_kernel[grid](given, answered, sizes, num_warps=WARPS, num_stages=STAGES)
    return answered


def _in_turns(kernel: Any, tensors: tuple[Any, ...], key: Tensor, sizes: Sizes) -> None:
    """Launch a kernel of `meeting.py` for all inner chunks: once on a device, else once for each turn.

    key: [B, H, N, T, D].
    """
    (rows, heads, count), parts = key.shape[:3], sizes.parts.value
    terms = key.new_empty(rows * heads, 2, parts, *key.shape[3:])
    at_once = parts == 1 or programs_run_together(key)
    started = arrived = None
    if at_once and parts > 1:
        started, arrived = key.new_zeros(rows * heads + 1, dtype=torch.int32).split((1, rows * heads))
    meeting, turns = Meeting(terms, started, arrived), count + 1
    for first in (0,) if at_once else range(turns):
        kernel[(rows * heads * parts,)](
            *tensors, meeting, heads, first, turns if at_once else first + 1, count, sizes, num_warps=WARPS,
            num_stages=STAGES,
        )  # fmt: skip


def programs_run_together(x: Tensor) -> bool:
    """Return whether the programs of a launch run at the same time where x [...] is: those of an interpreter do not."""
    return x.is_cuda


def through_reads(
    precision: Precision, network: Network, query: Tensor, shares: Shares, weight: Tensor | None, written: Written,
    answered: Tensor | None, out: Tensor,
) -> ReadGradients:  # fmt: skip
    """See `through_reads` of `group_backward.py`."""
    norm, of_weight = network.norm(weight), None
    if norm is not None and answered is not None:
        out, of_weight = network.pointwise.norm_gradients(out, answered, norm)
    grid, sizes, given = _reading(precision, network, query, shares, written)
    out, query, shares = out.contiguous(), given.query, given.shares
    wide = written.inputs[1].shape[-1]
    # gradients of what is a token's, by each head that reads it: [B, H, N, Q, ...]
    hidden, active, change, inputs = (query.new_empty(*query.shape[:-1], wide) for _ in range(4))
    found = reads.Found(
        _room(query), _room(shares.rated), None if shares.first is None else _room(shares.first),
        None if shares.carried is None else _room(shares.carried), hidden, active, _room(query), change, inputs,
        _room(query),
    )  # fmt: skip
    reads.through_reads_kernel[grid](given, out, found, sizes, num_warps=WARPS, num_stages=STAGES)
    key, change, inputs, wrong = (_of_memory(each, written) for each in (found.key, change, inputs, found.wrong))
    up = Reads(shared_factors(shares.first, hidden, query), None, key, change)
    down = Reads(shared_factors(shares.first, out, active), None, inputs, wrong)
    if shares.carried is not None:
        up = up._replace(momentum=shared_factors(shares.carried, hidden, query))
        down = down._replace(momentum=shared_factors(shares.carried, out, active))
    return ReadGradients(found.query, (found.rated, found.first, found.carried), of_weight, (up, down))


def _reading(
    precision: Precision, network: Network, query: Tensor, shares: Shares, written: Written
) -> tuple[tuple[int], Sizes, reads.Given]:  # fmt: skip
    """Return how many programs answer queries [B, H, N, Q, D], their constants, and what they read."""
    given = reads.Given(_contiguous(query), _contiguous(shares), _contiguous(written))
    sizes = _sizes(network, query, written.inputs[0], written.weights, precision)
    return (given.query.shape[:-1].numel() // written.inputs[0].shape[-2],), sizes, given


def _of_memory(x: Tensor, written: Written) -> Tensor:
    """Return gradients of a token's numbers, [B, H, N, T, ...], from those by head, [B, H, N, Q, ...]."""
    tokens = written.inputs[0].shape[-2]
    return x if x.shape[-2] == tokens else x.unflatten(3, (-1, tokens)).sum(3)


def through_writes(
    precision: Precision, network: Network, tokens: Tokens, shares: Shares, weight: Tensor | None, written: Written,
    handed: Sequence[Reads], of_weights: Weights, of_momentum: Weights,
) -> WriteGradients:  # fmt: skip
    """See `through_writes` of `group_backward.py`."""
    tokens, shares = _contiguous(tokens), _contiguous(shares)
    up, down = map(_contiguous, handed)
    key, parts = tokens.key, shared_heads.parts_of(tokens.key, of_weights[0].shape[-2])
    of_weight = None if weight is None or network.eps is None else key.new_empty(*key.shape[:3], key.shape[-1])
    of_key = key.new_empty(parts, *key.shape)
    of_shares = [None if x is None else x.new_empty(parts, *x.shape) for x in shares[OF_QUERIES:]]
    found = writes_backward.Found(
        # what is added to: the gradients that were given are somebody else's
        tuple(map(_copy, of_weights)), tuple(map(_copy, of_momentum)), _room(tokens.value), of_weight, of_key,
        *of_shares,  # type: ignore[arg-type]
    )  # fmt: skip
    given = writes_backward.Given(tokens.value, _contiguous(weight), shares, written, (up, down))
    sizes = _sizes(network, tokens.query, key, of_weights, precision, parts)
    _in_turns(writes_backward.through_writes_kernel, (given, found), key, sizes)
    return WriteGradients(
        found.weights, found.momentum, sum_of_parts(of_key), found.value,
        tuple(None if terms is None else sum_of_parts(terms) for terms in of_shares),
        None if of_weight is None else of_weight.sum((0, 2)),
    )  # fmt: skip


def sum_of_parts(terms: Tensor) -> Tensor:
    """Return the sum of the terms [parts, ...] of each part of a head's inner units."""
    return terms[0] if len(terms) == 1 else terms.sum(0)


def _sizes(
    network: Network, query: Tensor, key: Tensor, weights: Weights, precision: Precision, parts: int = 1
) -> Sizes:
    """Return the constants of kernels for networks of `weights` [..., out, in].

    query: [B, H, N, Q, D]; key: [B, H, N, T, D]; parts: programs that share a head's inner units.
    """
    count, width = key.shape[-2:]
    inner = weights[0].shape[-2]

    def block(size: int) -> int:
        """Return the power of two that holds so many."""
        return max(LEAST, triton.next_power_of_2(size))

    units = min(shared_heads.UNITS, block(inner))
    found: tuple[Any, ...] = (
        count, width, inner, query.shape[-2] // count, block(count), block(width), units, parts,
        units * math.ceil(inner / units / parts), network.loss == "l2", network.residual, network.eps, precision,
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
