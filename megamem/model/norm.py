"""Norms over the residual stream: RMSNorm, and LayerNorm as GPT-2 has it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megamem.config.model import ModelConfig
from megamem.parallel.linears import Linears, constant, declare


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis: x [..., width], weight [width]."""
    return F.rms_norm(x, x.shape[-1:], weight, eps)


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


class LayerNorm(nn.Module):
    """(x - mean) / deviation * weight + bias over the last axis (Ba et al. 2016)."""

    def __init__(self, width: int, eps: float, bias: bool, linears: Linears) -> None:
        super().__init__()
        self.eps = eps
        self.linears = linears
        self.weight = declare(nn.Parameter(torch.empty(width)), constant(1.0))
        self.bias = declare(nn.Parameter(torch.empty(width)), constant(0.0)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        weight = self.linears.outside(self.weight)
        bias = None if self.bias is None else self.linears.outside(self.bias)
        return F.layer_norm(x, x.shape[-1:], weight, bias, self.eps)


def make_norm(model: ModelConfig, linears: Linears) -> nn.Module:
    """Return the norm of `model.norm` over the residual stream."""
    if model.norm == "layer":
        return LayerNorm(model.hidden_size, model.norm_eps, model.all_biases, linears)
    return RMSNorm(model.hidden_size, model.norm_eps, linears)
