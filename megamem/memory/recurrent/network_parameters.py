"""What a deep memory learns outside the text: where each head's network starts, and the weight of the norm inside it.

Letters of shapes: H local key/value heads.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from megamem.config.model import ModelConfig
from megamem.parallel.linears import Linears, constant, declare, normal


class StartWeights(nn.Module):
    """The learned weights of each head's network before a document's first token."""

    def __init__(self, shapes: Mapping[str, tuple[int, int]], model: ModelConfig, linears: Linears) -> None:
        """Make them for matrices of these shapes [outputs, inputs], by name."""
        super().__init__()
        local = model.resolved_kv_heads // linears.tp_size
        for name, (rows, columns) in shapes.items():
            # each layer keeps the variance of its input
            start = nn.Parameter(torch.empty(local, rows, columns))
            self.register_parameter(name, declare(start, normal(columns**-0.5), shard_axis=0, fan_in=2))

    def forward(self) -> dict[str, Tensor]:
        """Return each matrix by name, [H, outputs, inputs]."""
        return dict(self.named_parameters())


class NormWeight(nn.Module):
    """The learned weight of the layer norm inside each head's memory."""

    def __init__(self, model: ModelConfig, linears: Linears) -> None:
        super().__init__()
        self.width = model.resolved_head_dim
        channels = model.resolved_kv_heads * self.width // linears.tp_size
        self.weight = declare(nn.Parameter(torch.empty(channels)), constant(1.0), shard_axis=0)

    def forward(self) -> Tensor:
        """Return the weight of each head, [H, head_dim]."""
        return self.weight.unflatten(0, (-1, self.width))
