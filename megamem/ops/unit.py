"""Vectors of length one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def unit(x: Tensor) -> Tensor:
    """x / |x| over the last axis, in the dtype of x; the length is taken in float32 (float64 of float64)."""
    exact = x if x.dtype == torch.float64 else x.float()
    return F.normalize(exact, dim=-1).to(x.dtype)
