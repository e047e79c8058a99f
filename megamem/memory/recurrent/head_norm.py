"""The norm and the output gate that what is read of a recurrent memory goes through."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megamem.parallel.linears import Linears, constant, declare


def gated_head_norm(read: Tensor, weight: Tensor, gate: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
    """Return RMSNorm over the width of each head, times SiLU(gate) if there is one.

    Args:
        read: [B, heads, T, V].
        weight: a factor for each channel, [heads * V].
        gate: [T, B, heads * V].
        eps: added to the mean square.
        dtype: of what is returned.
    Returns: [T, B, heads * V].
    """
    norm = F.rms_norm(read, read.shape[-1:], eps=eps) * weight.view(read.shape[1], 1, -1).to(read.dtype)
    beside = norm.to(dtype).permute(2, 0, 1, 3).flatten(2)
    return beside if gate is None else beside * F.silu(gate)


class HeadNorm(nn.Module):
    """RMSNorm over the width of each head, with a weight per channel, and the output gate."""

    def __init__(self, heads: int, width: int, eps: float, linears: Linears) -> None:
        super().__init__()
        self.eps, self.width = eps, width
        channels = heads * width // linears.tp_size
        self.weight = declare(nn.Parameter(torch.empty(channels)), constant(1.0), shard_axis=0)
        self.function = gated_head_norm

    def forward(self, read: Tensor, gate: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Normalize and gate `read` [B, heads, T, V]; see `gated_head_norm`."""
        return self.function(read, self.weight, gate, self.eps, dtype)
