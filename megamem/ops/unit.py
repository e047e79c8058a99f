"""Vectors of length one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def unit(x: Tensor) -> Tensor:
    """Return x / |x| over the last axis of x [..., width], in the dtype of x.

    The length is computed in float32, that of float64 in float64.
    """
    exact = x if x.dtype == torch.float64 else x.float()
    return F.normalize(exact, dim=-1).to(x.dtype)
