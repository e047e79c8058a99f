"""What computes the inner chunks of deep memories: torch, or the kernels in `triton/`, which need that package."""

from __future__ import annotations

import importlib.util
from typing import Literal

import torch
from torch import Tensor

from megamem.errors import ConfigError
from megamem.ops.deep_memory.group_backward import TORCH, GroupPasses
from megamem.ops.deep_memory.network import Precision

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


def check_kernel(kernel: Kernel) -> None:
    """Raise ConfigError if the kernel cannot run here."""
    if kernel == "torch":
        return
    if importlib.util.find_spec("triton") is None:
        raise ConfigError("model.deep_memory_kernel: triton is not installed; `pip install triton` or choose torch")
    if not torch.cuda.is_available():
        raise ConfigError("model.deep_memory_kernel: triton needs a CUDA device; choose torch")
