"""The kernels of Memora's networks as a function of tensors: a group of whole inner chunks, and back through it."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megamem.ops.deep_memory import shared_heads
from megamem.ops.deep_memory.network import Precision
from megamem.ops.deep_memory.simplex import SimplexNetwork, row_sum
from megamem.ops.deep_memory.simplex_group_backward import ReadGradients, SimplexPasses, WriteGradients
from megamem.ops.deep_memory.simplex_group_forward import Tokens
from megamem.ops.deep_memory.triton import launch
from megamem.ops.deep_memory.triton.launch import LEAST
from megamem.ops.deep_memory.triton.simplex_blocks import Sizes, Written
from megamem.ops.deep_memory.triton.simplex_reads import (
    Answers,
    read_simplex_kernel,
    through_simplex_reads_kernel,
)
from megamem.ops.deep_memory.triton.simplex_writes import Last, write_simplex_kernel
from megamem.ops.deep_memory.triton.simplex_writes_backward import through_simplex_writes_kernel


def simplex_passes(precision: Precision) -> SimplexPasses:
    """Return both passes of a group of inner chunks, whose queries are one head's [B, H, N, T, D]."""
    return SimplexPasses(
        partial(_write, precision), partial(_read, precision), partial(_through_reads, precision),
        partial(_through_writes, precision),
    )  # fmt: skip


def _sizes(precision: Precision, network: SimplexNetwork, tokens: Tokens, logs: tuple[Tensor, ...]) -> Sizes:
    """Return the constants of kernels for tokens [B, H, N, T, D] and networks of L [B, H, ..., out, in]."""
    (count, width), inner = tokens.key.shape[-2:], logs[0].shape[-2]

    def block(size: int) -> int:
        """Return the power of two that holds so many."""
        return max(LEAST, triton.next_power_of_2(size))

    sums = [row_sum(matrix, network.scale) for matrix in logs]
    found: tuple[Any, ...] = (
        count, width, inner, block(count), block(width), min(shared_heads.UNITS, block(inner)), True, network.residual,
        None if network.norm is None else network.norm.eps, precision, *sums, *map(math.log, sums),
        tokens.log_decay is not None,
    )  # fmt: skip
    return Sizes(*(None if each is None else tl.constexpr(each) for each in found))


def _write(
    precision: Precision, network: SimplexNetwork, tokens: Tokens, logs: tuple[Tensor, ...]
) -> tuple[Written, Last]:
    """Write inner chunks [B, H, N, ...] one after the other, from L [B, H, out, in]."""
    key, (rows, heads, count) = tokens.key, tokens.key.shape[:3]
    sizes = _sizes(precision, network, tokens, logs)

    def series(x: Tensor) -> Tensor:
        """Return room for a matrix [B, H, out, in] as each inner chunk starts, the first one in place."""
        made = x.new_empty(rows, heads, count, *x.shape[2:])
        made[:, :, 0] = x
        return made

    hidden, active, back, change = (key.new_empty(*key.shape[:-1], logs[0].shape[-2]) for _ in range(4))
    written = Written(
        series(logs[0]), series(logs[1]), hidden, active, back, change, torch.empty_like(key), torch.empty_like(key)
    )
    last = Last(torch.empty_like(logs[0]), torch.empty_like(logs[1]))
    write_simplex_kernel[(rows * heads,)](
        tokens, written, last, heads, count, sizes, num_warps=launch.WARPS, num_stages=launch.STAGES
    )  # fmt: skip
    return written, last


def _read(
    precision: Precision, network: SimplexNetwork, query: Tensor, tokens: Tokens, written: Written
) -> Answers:  # fmt: skip
    """Return what queries [B, H, N, T, D] are answered."""
    sizes = _sizes(precision, network, tokens, (written.up, written.down))
    sums = query.new_empty(*query.shape[:3], query.shape[-1])
    answers = Answers(torch.empty_like(query), torch.empty_like(query), sums)
    read_simplex_kernel[(query.shape[:3].numel(),)](
        tokens, query, written, answers, sizes, num_warps=launch.WARPS, num_stages=launch.STAGES
    )  # fmt: skip
    return answers


def _through_reads(
    precision: Precision, network: SimplexNetwork, query: Tensor, tokens: Tokens, written: Written, answers: Answers,
    out: Tensor,
) -> ReadGradients:  # fmt: skip
    """Return the gradients through what is read, from that of what the last matrix makes [B, H, N, T, D]."""
    sizes = _sizes(precision, network, tokens, (written.up, written.down))
    of_query, of_key, of_wrong, of_rate = (torch.empty_like(query) for _ in range(4))
    of_decay = None if tokens.log_decay is None else query.new_empty(*query.shape[:3], query.shape[-1])
    found = ReadGradients(
        of_query, of_key, of_wrong, of_rate, of_decay, torch.empty_like(written.change),
        torch.empty_like(written.active), torch.empty_like(written.up), torch.empty_like(written.down),
    )  # fmt: skip
    through_simplex_reads_kernel[(query.shape[:3].numel(),)](
        tokens, query, written, answers, out, found, sizes, num_warps=launch.WARPS, num_stages=launch.STAGES
    )
    return found


def _through_writes(
    precision: Precision, network: SimplexNetwork, tokens: Tokens, written: Written, reads: ReadGradients,
    of_last: tuple[Tensor, ...],
) -> WriteGradients:  # fmt: skip
    """Return the gradients of tokens [B, H, N, ...] and L, from those of L after the group [B, H, out, in]."""
    sizes = _sizes(precision, network, tokens, (written.up, written.down))
    rows, heads, count = tokens.key.shape[:3]

    def room(x: Tensor | None) -> Tensor | None:
        """Return room for the gradient of x [...], if it has one."""
        return None if x is None else torch.empty_like(x)

    # what is added to: the gradients that were given are somebody else's
    up, down = (x.clone(memory_format=torch.contiguous_format) for x in of_last)
    of_weight = None if tokens.weight is None else tokens.weight.new_empty(rows, *tokens.weight.shape)
    found = WriteGradients(
        up, down, torch.empty_like(tokens.key), torch.empty_like(tokens.value), torch.empty_like(tokens.rate),
        room(tokens.log_decay), room(tokens.fade), room(tokens.after), of_weight,
    )  # fmt: skip
    through_simplex_writes_kernel[(rows * heads,)](
        tokens, written, reads, found, heads, count, sizes, num_warps=launch.WARPS, num_stages=launch.STAGES
    )
    # heads of all rows share the norm's weight
    return found._replace(weight=None if of_weight is None else of_weight.sum(0))
