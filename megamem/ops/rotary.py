"""Rotary position embedding (RoFormer), in the half-split layout of Llama."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_angles(positions: Tensor, width: int, theta: float) -> Tensor:
    """Angles [..., width / 2] in float64 of integer `positions` [...]; float64 so that 1M tokens keep their phase."""
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device=positions.device) / width
    return positions.to(torch.float64)[..., None] * theta**-exponents


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate the pairs (x_i, x_{i + width/2}) of each head by its position's angles.

    Args:
        x: [tokens, batch, heads, width].
        positions: [tokens, batch] or [tokens, 1] integers.
        theta: base of the frequencies.
    Returns: like `x`, in its dtype.
    """
    angles = rotary_angles(positions, x.shape[-1], theta)[:, :, None]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
