"""What computes the inner chunks of deep memories: torch, or the kernels in `triton/`, which need that package."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from megamem.errors import ConfigError
from megamem.ops.deep_memory import kept_networks
from megamem.ops.deep_memory.group_backward import TORCH, GroupPasses
from megamem.ops.deep_memory.kept_networks import KeptPasses
from megamem.ops.deep_memory.network import Precision
from megamem.ops.deep_memory.selected_networks import SelectedPasses
from megamem.ops.deep_memory.simplex import ReadGroup

Kernel = Literal["torch", "triton"]


def passes_of(kernel: Kernel, precision: Precision, key: Tensor, matrices: int) -> GroupPasses:
    """Return both passes of groups of inner chunks: by the kernel where it has a part in them, else by torch.

    key: [B, H, ...], which says where is computed; matrices: of a network.
    """
    # float64, in which mechanisms are checked against loops, is torch's
    if kernel == "torch" or matrices != 2 or not key.is_cuda or key.dtype == torch.float64:
        return TORCH
    from megamem.ops.deep_memory.triton.launch import passes

    return passes(precision)


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


def read_group_of(kernel: Kernel, precision: Precision, query: Tensor, matrices: int) -> ReadGroup | None:
    """Return a group of Memora's inner chunks by the kernel, or None where it has no part in it.

    query: [B, H, G, N, T, D], which one head may ask; matrices: of a network.
    """
    alone = query.shape[2] == 1 and matrices == 2
    if kernel == "torch" or not alone or not query.is_cuda or query.dtype == torch.float64:
        return None
    from megamem.ops.deep_memory.triton.launch_simplex import read_group_by

    return read_group_by(precision)


def _reads_kept(kernel: Kernel, query: Tensor, matrices: Sequence[Tensor]) -> bool:
    """Return whether the kernel reads kept networks: of two matrices, as wide as their queries, not in float64.

    query: [B, H, ..., D]; matrices: [B, H, N, ...] each.
    """
    as_wide = len(matrices) == 2 and matrices[-1].shape[-1] == query.shape[-1]
    return kernel == "triton" and as_wide and query.is_cuda and query.dtype != torch.float64


def check_kernel(kernel: Kernel) -> None:
    """Raise ConfigError if the kernel cannot run here."""
    if kernel == "torch":
        return
    if importlib.util.find_spec("triton") is None:
        raise ConfigError("model.deep_memory_kernel: triton is not installed; `pip install triton` or choose torch")
    if not torch.cuda.is_available():
        raise ConfigError("model.deep_memory_kernel: triton needs a CUDA device; choose torch")
