"""RMSNorm and the SwiGLU MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megamem.config.model import ModelConfig
from megamem.parallel.linears import Linears, constant, declare, normal


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis."""
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return F.silu(gate) * up


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis; the mean square is taken in float32 (Zhang & Sennrich 2019)."""

    def __init__(self, width: int, eps: float, linears: Linears) -> None:
        super().__init__()
        self.eps = eps
        self.linears = linears
        self.function = rms_norm
        self.weight = declare(nn.Parameter(torch.empty(width)), constant(1.0))

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        return self.function(x, self.linears.outside(self.weight), self.eps)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), inner units split over ranks (Shazeer 2020)."""

    def __init__(self, model: ModelConfig, linears: Linears) -> None:
        super().__init__()
        self.linears = linears
        self.gated = gated
        init = normal(model.init_std)
        self.gate = linears.column(model.hidden_size, model.ffn, init)
        self.up = linears.column(model.hidden_size, model.ffn, init)
        self.down = linears.row(model.ffn, model.hidden_size, normal(model.init_std / (2 * model.layers) ** 0.5))

    def forward(self, hidden: Tensor) -> Tensor:
        """[tokens, batch, hidden] -> [tokens, batch, hidden]."""
        x = self.linears.enter(hidden)
        out: Tensor = self.down(self.gated(self.gate(x), self.up(x)))
        return out
