"""Rotary position embedding (RoFormer, Su et al., 2021), in the half-split layout of Llama."""

from __future__ import annotations

import torch
from torch import Tensor

from megamem.ops.tables import kept_table

RotaryTables = tuple[Tensor, Tensor]
"""Cosine and sine of each token's angles, [tokens, batch or 1, 1, head_dim / 2] each."""


def rotary_angles(positions: Tensor, width: int, theta: float) -> Tensor:
    """Return the angles position * theta^(-2i / width), i = 0 .. width / 2 - 1 (RoFormer, equation 15).

    Args:
        positions: integers of any shape [...].
        width: width of a head.
        theta: base of the frequencies.
    Returns: [..., width / 2] in float64, so that positions beyond a million keep their phase.
    """
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device=positions.device) / width
    return positions.to(torch.float64)[..., None] * theta**-exponents


def rotary_tables(positions: Tensor, width: int, theta: float, dtype: torch.dtype) -> RotaryTables:
    """Return cosine and sine, in `dtype`, of the angles of integer `positions` [tokens, batch or 1]."""
    angles = rotary_angles(positions, width, theta)[:, :, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


@kept_table(32)
def consecutive_rotary_tables(
    first: int, tokens: int, width: int, theta: float, dtype: torch.dtype, device: torch.device
) -> RotaryTables:
    """Return `rotary_tables` of the positions first, first + 1, ..., the same in every row.

    Cached, so that layers and chunks share them.
    """
    positions = torch.arange(first, first + tokens, device=device)[:, None]
    return rotary_tables(positions, width, theta, dtype)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x_i, x_{i + width/2}) by its angle (RoFormer, equation 34).

    Args:
        x: queries or keys [tokens, batch, heads, width].
        cos, sin: a `RotaryTables` [tokens, batch or 1, 1, width / 2], in the dtype of x.
    Returns: like `x`.
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
