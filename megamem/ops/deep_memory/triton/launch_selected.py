"""The kernels of selected networks as functions of tensors, for networks of two matrices as wide as their queries."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import triton
from torch import Tensor

from megamem.ops.deep_memory.network import Precision
from megamem.ops.deep_memory.selected_networks import Pairs, SelectedPasses
from megamem.ops.deep_memory.triton import selected
from megamem.ops.deep_memory.triton.kept import Sizes
from megamem.ops.deep_memory.triton.launch import STAGES
from megamem.ops.deep_memory.triton.launch_kept import WARPS, kept_sizes


def selected_passes(precision: Precision) -> SelectedPasses:
    """Return both passes by the kernels."""
    return SelectedPasses(partial(answer, precision), partial(gradients, precision))


def answer(
    precision: Precision, rows: Tensor, shares: Tensor, pairs: Pairs, eps: float | None, matrices: Sequence[Tensor]
) -> Tensor:
    """See `SelectedPasses`."""
    given, sizes = _given(precision, rows, shares, pairs, eps, matrices)
    each = pairs.order.shape[-1] // rows.shape[2]
    # pairs that there are not add nothing
    parts = shares.new_zeros(*rows.shape[:3], each, rows.shape[-1])
    selected.answer_pairs_kernel[_grid(rows, shares, sizes)](
        given, parts, rows.shape[2], shares.shape[-1], each, sizes, num_warps=WARPS, num_stages=STAGES
    )
    return parts


def gradients(
    precision: Precision, of_total: Tensor, rows: Tensor, shares: Tensor, pairs: Pairs, eps: float | None,
    matrices: Sequence[Tensor],
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """See `SelectedPasses`."""
    given, sizes = _given(precision, rows, shares, pairs, eps, matrices)
    count, height, width = shares.shape[-1], rows.shape[2], rows.shape[-1]
    each = pairs.order.shape[-1] // height
    up, down = (torch.empty_like(matrix, memory_format=torch.contiguous_format) for matrix in matrices)
    found = selected.Found(
        rows.new_zeros(*rows.shape[:3], each, width), torch.zeros_like(given.shares),
        rows.new_empty(*rows.shape[:2], height * each, width), up, down,
    )  # fmt: skip
    selected.through_pairs_kernel[_grid(rows, shares, sizes)](
        given, of_total.contiguous(), found, height, count, each, sizes, num_warps=WARPS, num_stages=STAGES
    )
    heads, blocks = rows.shape[:2].numel(), triton.cdiv(up.shape[-2], int(sizes.unit_block))
    selected.through_pair_matrices_kernel[(heads, count, blocks)](
        given, found, height, count, each, sizes, num_warps=WARPS, num_stages=STAGES
    )
    return found.rows, found.shares, [found.up, found.down]


def _grid(rows: Tensor, shares: Tensor, sizes: Sizes) -> tuple[int, int, int]:
    """Return the programs for as many pairs as a network may have: all rows [B, H, R, D]; shares: [B, H, R, N]."""
    return rows.shape[:2].numel(), shares.shape[-1], triton.cdiv(rows.shape[2], int(sizes.row_block))


def _given(
    precision: Precision, rows: Tensor, shares: Tensor, pairs: Pairs, eps: float | None, matrices: Sequence[Tensor]
) -> tuple[selected.Given, Sizes]:
    """Return what the kernels read, and their constants; tensors [B, H, ...] as in `SelectedPasses`."""
    up, down = (matrix.contiguous() for matrix in matrices)
    given = selected.Given(rows.contiguous(), shares.contiguous(), up, down, *map(Tensor.contiguous, pairs))
    return given, kept_sizes(precision, rows, up, eps)
