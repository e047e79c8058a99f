"""What computes the inner chunks of deep memories: torch, or the kernels in `triton/`, which need that package."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from megamem.errors import ConfigError
from megamem.ops.deep_memory import kept_networks, simplex_group_backward
from megamem.ops.deep_memory.group_backward import TORCH, GroupPasses
from megamem.ops.deep_memory.kept_networks import KeptPasses
from megamem.ops.deep_memory.network import Precision
from megamem.ops.deep_memory.selected_networks import SelectedPasses
from megamem.ops.deep_memory.simplex import ReadGroup
from megamem.ops.deep_memory.simplex_group import read_group_by
from megamem.ops.deep_memory.simplex_group_backward import SimplexPasses

Kernel = Literal["torch", "triton"]
WIDEST = 128
"""Channels of the widest heads that the kernels have room for on an H100's multiprocessors."""
LONGEST = 64
"""Tokens of the longest inner chunks that they have room to read, or of Memora's to read and write."""
LONGEST_WRITTEN = 128
"""Tokens of the longest inner chunks that they have room to write."""


def passes_of(kernel: Kernel, precision: Precision, inner_chunk: int, key: Tensor, matrices: int) -> GroupPasses:
    """Return both passes of groups of inner chunks: by the kernel where it has a part in them, else by torch.

    key: [B, H, ..., D], which says where is computed; matrices: of a network.
    """
    if not _computes(kernel, key, matrices):
        return TORCH
    from megamem.ops.deep_memory.triton.launch import passes

    return fitting(passes(precision), inner_chunk)


def fitting(passes: GroupPasses, inner_chunk: int) -> GroupPasses:
    """Return passes by kernels, or torch's instead of those for which so many tokens do not fit on a multiprocessor."""
    if inner_chunk <= LONGEST:
        return passes
    if inner_chunk > LONGEST_WRITTEN:
        return TORCH
    return passes._replace(read=TORCH.read, through_reads=TORCH.through_reads)


def _computes(kernel: Kernel, x: Tensor, matrices: int) -> bool:
    """Return whether the kernel computes networks of so many matrices; x: [..., D], of a head's width.

    float64, in which mechanisms are checked against loops, is torch's.
    """
    fits = matrices == 2 and x.shape[-1] <= WIDEST
    return kernel == "triton" and fits and x.is_cuda and x.dtype != torch.float64


def kept_passes_of(kernel: Kernel, precision: Precision, query: Tensor, matrices: Sequence[Tensor]) -> KeptPasses:
    """Return both passes of kept networks: by the kernel where it has a part in them, else by torch.

    query: [B, H, ..., D]; matrices: [B, H, N, ...] each.
    """
    if not _reads_kept(kernel, query, matrices):
        return kept_networks.TORCH
    from megamem.ops.deep_memory.triton.launch_kept import kept_passes

    return kept_passes(precision)


def selected_passes_of(
    kernel: Kernel, precision: Precision, query: Tensor, matrices: Sequence[Tensor]
) -> SelectedPasses | None:
    """Return both passes of selected networks by the kernel, or None where it has no part in them.

    query: [B, H, ..., D]; matrices: [B, H, N, ...] each.
    """
    if not _reads_kept(kernel, query, matrices):
        return None
    from megamem.ops.deep_memory.triton.launch_selected import selected_passes

    return selected_passes(precision)


def simplex_passes_of(kernel: Kernel, precision: Precision, query: Tensor, matrices: int) -> SimplexPasses:
    """Return both passes of groups of Memora's inner chunks: by the kernel where it has a part in them, else by torch.

    query: [B, H, G, N, T, D], which one head may ask of a kernel; matrices: of a network.
    """
    alone = query.shape[2] == 1 and query.shape[-2] <= LONGEST
    if not alone or not _computes(kernel, query, matrices):
        return simplex_group_backward.TORCH
    from megamem.ops.deep_memory.triton.launch_simplex import simplex_passes

    return simplex_passes(precision)


def read_group_of(kernel: Kernel, precision: Precision, query: Tensor, matrices: int) -> ReadGroup | None:
    """Return what computes a group of Memora's inner chunks; None for a single matrix, which is left to autograd.

    query: [B, H, G, N, T, D]; matrices: of a network.
    """
    if matrices != 2:
        return None
    return read_group_by(simplex_passes_of(kernel, precision, query, matrices))


def _reads_kept(kernel: Kernel, query: Tensor, matrices: Sequence[Tensor]) -> bool:
    """Return whether the kernel reads kept networks: of two matrices, as wide as their queries, not in float64.

    query: [B, H, ..., D]; matrices: [B, H, N, ...] each.
    """
    return matrices[-1].shape[-1] == query.shape[-1] and _computes(kernel, query, len(matrices))


def check_kernel(kernel: Kernel) -> None:
    """Raise ConfigError if the kernel cannot run here."""
    if kernel == "torch":
        return
    if importlib.util.find_spec("triton") is None:
        raise ConfigError("model.deep_memory_kernel: triton is not installed; `pip install triton` or choose torch")
    if not torch.cuda.is_available():
        raise ConfigError("model.deep_memory_kernel: triton needs a CUDA device; choose torch")
