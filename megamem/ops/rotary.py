"""Rotary position embedding (RoFormer), in the half-split layout of Llama."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

Tables = tuple[Tensor, Tensor]


def rotary_angles(positions: Tensor, width: int, theta: float) -> Tensor:
    """Angles [..., width / 2] in float64 of integer `positions` [...]; float64 so that 1M tokens keep their phase."""
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device=positions.device) / width
    return positions.to(torch.float64)[..., None] * theta**-exponents


def rotary_tables(positions: Tensor, width: int, theta: float, dtype: torch.dtype) -> Tables:
    """Cosine and sine [tokens, batch or 1, 1, width / 2] of `positions` [tokens, batch or 1]."""
    angles = rotary_angles(positions, width, theta)[:, :, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


@lru_cache(maxsize=32)
def run_tables(first: int, tokens: int, width: int, theta: float, dtype: torch.dtype, device: torch.device) -> Tables:
    """`rotary_tables` of the positions first, first + 1, ..., the same in every row; layers and chunks share them."""
    # tables first asked for under inference_mode must still be usable in training
    with torch.inference_mode(False):
        positions = torch.arange(first, first + tokens, device=device)[:, None]
        return rotary_tables(positions, width, theta, dtype)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x_i, x_{i + width/2}) of each head of x [tokens, batch, heads, width] by its angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate each head by its position's angles.

    Args:
        x: [tokens, batch, heads, width].
        positions: [tokens, batch] or [tokens, 1] integers.
        theta: base of the frequencies.
    Returns: like `x`, in its dtype.
    """
    return turn(x, *rotary_tables(positions, x.shape[-1], theta, x.dtype))
