"""Attention by cosines: queries and keys of length one, their products multiplied by a learned number per head."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from megamem.ops.unit import unit
from megamem.parallel.linears import constant, declare


class CosineScale(nn.Module):
    """A learned positive number per head, by which cosines of queries and keys are multiplied."""

    def __init__(self, heads: int, start: float) -> None:
        """Make the scales of `heads` local heads; start: their value before training."""
        super().__init__()
        self.log = declare(nn.Parameter(torch.empty(heads)), constant(math.log(start)), shard_axis=0)

    def forward(self) -> Tensor:
        """Return the scales [local heads]."""
        return self.log.exp()


def cosine_pair(query: Tensor, key: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return query and key for which attention's q k^T / sqrt(head_dim) is the scale times their cosine.

    Args:
        query: [tokens, batch, local heads, head_dim].
        key: [tokens, batch, local kv_heads, head_dim].
        scale: `CosineScale()`, [local heads].
    """
    # attention kernels divide by sqrt(head_dim), which cancels here
    factor = (scale * query.shape[-1] ** 0.5)[:, None].to(query.dtype)
    return unit(query) * factor, unit(key)
