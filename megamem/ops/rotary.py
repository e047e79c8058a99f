"""Rotary position embedding (RoFormer, Su et al., 2021), in the half-split layout of Llama."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from megamem.ops.tables import kept_table

RotaryTables = tuple[Tensor, Tensor]
"""Cosine and sine of each token's angles, [tokens, batch or 1, 1, head_dim / 2] each."""


class RotaryScaling(NamedTuple):
    """Slower rotations for longer texts; fields as in `megamem.config.rope.RopeScaling`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


class Rotation(NamedTuple):
    """What the frequencies of rotary positions depend on besides the width of a head."""

    theta: float
    """Their base."""
    scaling: RotaryScaling | None = None
    """How they are slowed down; None: not at all."""


def rotary_frequencies(width: int, rotation: Rotation, device: torch.device | None = None) -> Tensor:
    """Return theta^(-2i / width), i = 0 .. width / 2 - 1 (RoFormer, equation 15), slowed down where `rotation` says so.

    width: width of a head. Returns: [width / 2] in float64.
    """
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device=device) / width
    frequencies, scaling = rotation.theta**-exponents, rotation.scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    whole = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (whole + (1 - whole) / scaling.factor)


def rotary_angles(positions: Tensor, width: int, rotation: Rotation) -> Tensor:
    """Return the angles of positions, each times the frequencies.

    Args:
        positions: integers of any shape [...].
        width: width of a head.
    Returns: [..., width / 2] in float64, so that positions beyond a million keep their phase.
    """
    return positions.to(torch.float64)[..., None] * rotary_frequencies(width, rotation, positions.device)


def rotary_tables(positions: Tensor, width: int, rotation: Rotation, dtype: torch.dtype) -> RotaryTables:
    """Return cosine and sine, in `dtype`, of the angles of integer `positions` [tokens, batch or 1]."""
    angles = rotary_angles(positions, width, rotation)[:, :, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


@kept_table(32)
def consecutive_rotary_tables(
    first: int, tokens: int, width: int, rotation: Rotation, dtype: torch.dtype, device: torch.device
) -> RotaryTables:
    """Return `rotary_tables` of the positions first, first + 1, ..., the same in every row.

    Cached, so that layers and chunks share them.
    """
    positions = torch.arange(first, first + tokens, device=device)[:, None]
    return rotary_tables(positions, width, rotation, dtype)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x_i, x_{i + width/2}) by its angle (RoFormer, equation 34).

    Args:
        x: queries or keys [tokens, batch, heads, width].
        cos, sin: a `RotaryTables` [tokens, batch or 1, 1, width / 2], in the dtype of x.
    Returns: like `x`.
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
