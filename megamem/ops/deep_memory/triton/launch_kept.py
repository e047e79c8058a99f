"""The kernels of kept networks as functions of tensors, for networks of two matrices as wide as their queries."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megamem.ops.deep_memory.kept_networks import PROGRAM_ROWS, KeptPasses
from megamem.ops.deep_memory.network import Precision
from megamem.ops.deep_memory.pointwise import Pointwise
from megamem.ops.deep_memory.triton import kept
from megamem.ops.deep_memory.triton.launch import LEAST, STAGES

UNITS = 64
"""Inner units that are on the chip at a time."""
WARPS = 8


def kept_passes(precision: Precision) -> KeptPasses:
    """Return both passes by the kernels."""
    return KeptPasses(partial(answer, precision), partial(gradients, precision))


def answer(
    precision: Precision, rows: Tensor, shares: Tensor, eps: float | None, reading: Sequence[slice],
    pointwise: Pointwise, matrices: Sequence[Tensor],
) -> Tensor:  # fmt: skip
    """See `answer` of `kept_networks.py`; the kernel has its own functions of numbers."""
    given, sizes = _given(precision, rows, shares, eps, reading, matrices)
    total = shares.new_empty(rows.shape)
    grid = rows.shape[0] * rows.shape[1], triton.cdiv(rows.shape[2], int(sizes.row_block))
    kept.answer_kernel[grid](given, total, rows.shape[2], shares.shape[-1], sizes, num_warps=WARPS, num_stages=STAGES)
    return total


def gradients(
    precision: Precision, of_total: Tensor, rows: Tensor, shares: Tensor, eps: float | None,
    reading: Sequence[slice], pointwise: Pointwise, matrices: Sequence[Tensor],
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """See `gradients` of `kept_networks.py`; the kernels have their own functions of numbers."""
    given, sizes = _given(precision, rows, shares, eps, reading, matrices)
    count, height = shares.shape[-1], rows.shape[2]
    up, down = (torch.empty_like(each, memory_format=torch.contiguous_format) for each in matrices)
    found = kept.Found(
        torch.empty_like(given.rows), torch.zeros_like(given.shares), room_of_made(rows, count), up, down
    )  # fmt: skip
    heads = rows.shape[0] * rows.shape[1]
    kept.through_rows_kernel[(heads, triton.cdiv(height, int(sizes.row_block)))](
        given, of_total.contiguous(), found, height, count, sizes, num_warps=WARPS, num_stages=STAGES
    )
    kept.through_matrices_kernel[(heads, count, triton.cdiv(up.shape[-2], _block(UNITS, up.shape[-2])))](
        given, found, height, count, sizes, num_warps=WARPS, num_stages=STAGES
    )
    return found.rows, found.shares, [found.up, found.down]


def room_of_made(rows: Tensor, count: int) -> Tensor:
    """Return room for the gradients of what so many networks make of rows [B, H, R, D]: [B, H, N, R, D]."""
    return rows.new_empty(*rows.shape[:2], count, *rows.shape[2:])


def _given(
    precision: Precision, rows: Tensor, shares: Tensor, eps: float | None, reading: Sequence[slice],
    matrices: Sequence[Tensor],
) -> tuple[kept.Given, kept.Sizes]:  # fmt: skip
    """Return what the kernels read, and their constants; tensors [B, H, ...] as in `kept_networks.py`."""
    up, down = matrices
    spans = _spans(tuple(each.indices(rows.shape[2])[:2] for each in reading), rows.device)
    given = kept.Given(rows.contiguous(), shares.contiguous(), up.contiguous(), down.contiguous(), spans)
    return given, kept_sizes(precision, rows, up, eps)


def kept_sizes(precision: Precision, rows: Tensor, up: Tensor, eps: float | None) -> kept.Sizes:
    """Return the constants of kernels for rows [B, H, R, D] and networks whose first matrices are [B, H, N, I, D]."""
    width, inner = up.shape[-1], up.shape[-2]
    block = max(LEAST, triton.next_power_of_2(width))
    constants: tuple[Any, ...] = width, inner, PROGRAM_ROWS[rows.itemsize], block, _block(UNITS, inner), eps, precision
    return kept.Sizes(*(None if each is None else tl.constexpr(each) for each in constants))


def _block(most: int, size: int) -> int:
    """Return how many inner units of so many are on the chip at a time."""
    return min(most, max(LEAST, triton.next_power_of_2(size)))


@lru_cache(maxsize=64)
def _spans(spans: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """Return rows that read each network [N, 2] on a device; chunk after chunk asks for the same, on one stream."""
    found = torch.tensor(spans, dtype=torch.int32, device="cpu")
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found.to(device)
