"""The kernels of selected networks as functions of tensors, for networks of two matrices as wide as their queries."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from megamem.ops.deep_memory.network import Precision
from megamem.ops.deep_memory.selected_networks import Lists, Pairs, SelectedPasses
from megamem.ops.deep_memory.triton import selected
from megamem.ops.deep_memory.triton.kept import Sizes
from megamem.ops.deep_memory.triton.launch import STAGES
from megamem.ops.deep_memory.triton.launch_kept import WARPS, kept_sizes


def selected_passes(precision: Precision) -> SelectedPasses:
    """Return both passes by the kernels."""
    return SelectedPasses(partial(answer, precision), partial(gradients, precision))


def answer(precision: Precision, rows: Tensor, shares: Tensor, pairs: Pairs, eps: float | None, lists: Lists) -> Tensor:
    """See `SelectedPasses`."""
    # pairs that there are not add nothing
    parts = shares.new_zeros(*rows.shape[:3], pairs.order.shape[-1] // rows.shape[2], rows.shape[-1])
    for given, place, sizes in _of_lists(precision, rows, shares, pairs, eps, lists):
        selected.answer_pairs_kernel[_grid(rows, given, sizes)](
            given, parts, place, sizes, num_warps=WARPS, num_stages=STAGES
        )
    return parts


def gradients(
    precision: Precision, of_total: Tensor, rows: Tensor, shares: Tensor, pairs: Pairs, eps: float | None, lists: Lists
) -> tuple[Tensor, Tensor, Lists]:
    """See `SelectedPasses`."""
    height, width, of_total = rows.shape[2], rows.shape[-1], of_total.contiguous()
    pairs_of_row = pairs.order.shape[-1] // height
    of_rows, of_shares = rows.new_zeros(*rows.shape[:3], pairs_of_row, width), torch.zeros_like(shares.contiguous())
    of_made, of_lists = rows.new_empty(*rows.shape[:2], height * pairs_of_row, width), []
    for given, place, sizes in _of_lists(precision, rows, shares, pairs, eps, lists):
        found = selected.Found(of_rows, of_shares, of_made, torch.empty_like(given.up), torch.empty_like(given.down))
        grid = _grid(rows, given, sizes)
        selected.through_pairs_kernel[grid](
            given, of_total, found, place, sizes, num_warps=WARPS, num_stages=STAGES
        )  # fmt: skip
        blocks = triton.cdiv(given.up.shape[-2], int(sizes.unit_block))
        selected.through_pair_matrices_kernel[(*grid[:2], blocks)](
            given, found, place, sizes, num_warps=WARPS, num_stages=STAGES
        )
        of_lists.append([found.up, found.down])
    return of_rows, of_shares, of_lists


def _grid(rows: Tensor, given: selected.Given, sizes: Sizes) -> tuple[int, int, int]:
    """Return the programs for as many pairs as a network may have: all rows [B, H, R, D]."""
    return rows.shape[:2].numel(), given.up.shape[2], triton.cdiv(rows.shape[2], int(sizes.row_block))


def _of_lists(
    precision: Precision, rows: Tensor, shares: Tensor, pairs: Pairs, eps: float | None, lists: Lists
) -> Iterator[tuple[selected.Given, selected.Place, Sizes]]:
    """Yield what the kernels of each list read, where it lies among all, and constants; tensors [B, H, ...]."""
    rows, shares, first = rows.contiguous(), shares.contiguous(), 0
    height = rows.shape[2]
    for matrices in lists:
        up, down = (matrix.contiguous() for matrix in matrices)
        place = selected.Place(
            height, up.shape[2], first, shares.shape[-1], tl.constexpr(pairs.order.shape[-1] // height)
        )  # fmt: skip
        given = selected.Given(rows, shares, up, down, *map(Tensor.contiguous, pairs))
        yield given, place, kept_sizes(precision, rows, up, eps)
        first += place.count
