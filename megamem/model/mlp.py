"""MLPs of layers: SwiGLU, and two projections with a GELU or a ReLU between them."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from megamem.config.model import ModelConfig
from megamem.memory.base import Chunk
from megamem.ops.dropout import dropped
from megamem.parallel.linears import Linears, normal


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, elementwise: [..., width] each."""
    return F.silu(gate) * up


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), inner units split over ranks (Shazeer 2020)."""

    def __init__(self, model: ModelConfig, linears: Linears) -> None:
        super().__init__()
        self.linears = linears
        self.gated = gated
        self.width = model.resolved_ffn_size // linears.tp_size
        init = normal(model.init_std)
        back = normal(model.init_std / (2 * model.layers) ** 0.5)
        self.gate = linears.column(model.hidden_size, model.resolved_ffn_size, init, model.all_biases)
        self.up = linears.column(model.hidden_size, model.resolved_ffn_size, init, model.all_biases)
        self.down = linears.row(model.resolved_ffn_size, model.hidden_size, back, model.all_biases)

    def forward(self, hidden: Tensor, chunk: Chunk) -> Tensor:
        """[tokens, batch, hidden] -> [tokens, batch, hidden]; nothing is dropped inside."""
        x = self.linears.enter(hidden)
        out: Tensor = self.down(self.gated(self.gate(x), self.up(x)))
        return out


def gelu(x: Tensor) -> Tensor:
    """GELU in its tanh form, elementwise: [...]."""
    return F.gelu(x, approximate="tanh")


class TwoLayerMLP(nn.Module):
    """down(f(up(x))), inner units split over ranks: f is GELU's tanh form (GPT-2) or ReLU (Vaswani et al. 2017)."""

    def __init__(self, model: ModelConfig, linears: Linears) -> None:
        super().__init__()
        self.linears = linears
        self.activation = gelu if model.mlp == "gelu" else F.relu
        # GPT-2 drops nothing here, the first Transformers and Transformer-XL do
        self.dropout = 0.0 if model.mlp == "gelu" else model.dropout
        back = normal(model.init_std / (2 * model.layers) ** 0.5)
        self.up = linears.column(model.hidden_size, model.resolved_ffn_size, normal(model.init_std), model.all_biases)
        self.down = linears.row(model.resolved_ffn_size, model.hidden_size, back, model.all_biases)

    def forward(self, hidden: Tensor, chunk: Chunk) -> Tensor:
        """[tokens, batch, hidden] -> [tokens, batch, hidden]; chunk: where the tokens lie, for dropout."""
        inner = self.activation(self.up(self.linears.enter(hidden)))
        dropout = chunk.drops(self.dropout, "inner", self.linears.tp_rank * inner.shape[-1])
        out: Tensor = self.down(dropped(inner, dropout))
        return out


def make_mlp(model: ModelConfig, linears: Linears) -> nn.Module:
    """Return the MLP of `model.mlp`."""
    return SwiGLU(model, linears) if model.mlp == "swiglu" else TwoLayerMLP(model, linears)
