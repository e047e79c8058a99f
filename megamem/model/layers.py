"""Norms and MLPs: RMSNorm and SwiGLU, and GPT-2's."""

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
    """The norm of `model.norm` over the residual stream."""
    if model.norm == "layer":
        return LayerNorm(model.hidden_size, model.norm_eps, model.bias, linears)
    return RMSNorm(model.hidden_size, model.norm_eps, linears)


def make_mlp(model: ModelConfig, linears: Linears) -> nn.Module:
    """The MLP of `model.mlp`."""
    return SwiGLU(model, linears) if model.mlp == "swiglu" else GeluMLP(model, linears)


class GeluMLP(nn.Module):
    """down(gelu(up(x))) with GELU's tanh form, inner units split over ranks (GPT-2)."""

    def __init__(self, model: ModelConfig, linears: Linears) -> None:
        super().__init__()
        self.linears = linears
        back = normal(model.init_std / (2 * model.layers) ** 0.5)
        self.up = linears.column(model.hidden_size, model.resolved_ffn_size, normal(model.init_std), model.bias)
        self.down = linears.row(model.resolved_ffn_size, model.hidden_size, back, model.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[tokens, batch, hidden] -> [tokens, batch, hidden]."""
        out: Tensor = self.down(F.gelu(self.up(self.linears.enter(hidden)), approximate="tanh"))
        return out


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), inner units split over ranks (Shazeer 2020)."""

    def __init__(self, model: ModelConfig, linears: Linears) -> None:
        super().__init__()
        self.linears = linears
        self.gated = gated
        init = normal(model.init_std)
        back = normal(model.init_std / (2 * model.layers) ** 0.5)
        self.gate = linears.column(model.hidden_size, model.resolved_ffn_size, init, model.bias)
        self.up = linears.column(model.hidden_size, model.resolved_ffn_size, init, model.bias)
        self.down = linears.row(model.resolved_ffn_size, model.hidden_size, back, model.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[tokens, batch, hidden] -> [tokens, batch, hidden]."""
        x = self.linears.enter(hidden)
        out: Tensor = self.down(self.gated(self.gate(x), self.up(x)))
        return out
