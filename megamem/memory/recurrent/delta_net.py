"""DeltaNet: a matrix per head that takes back what it held for a key before it writes the key's new value.

Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", 2024; with `decay` it is
Gated DeltaNet (Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2025, equation 10).

    S_t = a_t (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T,   y_t = S_t^T q_t / sqrt(d),   |k_t| = |q_t| = 1
    b_t = sigmoid(w_b . x_t);   a_t = exp(-exp(A) softplus(w_a . x_t + c)), or 1
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megamem.config.cost import Flops
from megamem.config.model import MIXERS, ModelConfig
from megamem.memory.base import Chunk
from megamem.memory.recurrent.base import Inputs, TokenGate
from megamem.memory.recurrent.matrix import MatrixConfig, MatrixMixer, matrix_flops
from megamem.ops.linear_recurrence.unrolled import passed
from megamem.parallel.linears import Linears, constant, declare

FIRST_DECAY = math.log(math.expm1(0.01))
"""Start value of c: with A = 0 a memory fades by 1 % per token."""


@MIXERS.register
class DeltaNetConfig(MatrixConfig):
    """DeltaNet: outer products written by the delta rule, at a rate of each token and head; or Gated DeltaNet."""

    kind: Literal["delta_net"] = "delta_net"
    """`delta_net`"""
    decay: bool = False
    """Forget at a rate of each token and head: Gated DeltaNet."""

    def token_gates(self) -> int:
        """See `RecurrentConfig.token_gates`: rate, and decay."""
        return 2 if self.decay else 1

    def extra_parameters(self, model: ModelConfig) -> int:
        """Count convolutions and norm, and the start values of the gates, with A of the decay."""
        return super().extra_parameters(model) + model.resolved_kv_heads * (3 if self.decay else 1)

    def transition_size(self, model: ModelConfig) -> int:
        """See `RecurrentConfig.transition_size`: a matrix over the channels of keys."""
        return model.resolved_head_dim

    def memory_flops(self, model: ModelConfig, sequence_length: float, causal: bool, begun: int) -> dict[str, Flops]:
        """See `matrix_flops`."""
        return matrix_flops(self, model, sequence_length, causal, begun, delta=True)

    def build(self, model: ModelConfig, linears: Linears, layer: int) -> DeltaNet:
        """See `MixerConfig.build`."""
        return DeltaNet(self, model, linears)


class Decay(nn.Module):
    """The decay of each token and head: log a_t = -exp(A) softplus(w . x_t + c), A and c per head."""

    def __init__(self, model: ModelConfig, linears: Linears) -> None:
        super().__init__()
        self.token = TokenGate(model, linears, FIRST_DECAY)
        self.log_pace = declare(
            nn.Parameter(torch.empty(model.resolved_kv_heads // linears.tp_size)), constant(0.0), shard_axis=0
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map x [tokens, batch, hidden_size] to log a_t [batch, local kv_heads, tokens]."""
        token: Tensor = self.token(x)
        return -self.log_pace.to(token.dtype).exp()[:, None] * F.softplus(token)


class DeltaNet(MatrixMixer):
    """A matrix memory written by the delta rule, with or without decay."""

    def __init__(self, config: DeltaNetConfig, model: ModelConfig, linears: Linears) -> None:
        super().__init__(config, model, linears)
        self.unit_keys = True
        self.rate = TokenGate(model, linears, 0.0)
        self.decay = Decay(model, linears) if config.decay else None

    def prepare(self, query: Tensor, key: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """See `RecurrentMixer.prepare`: unit vectors."""
        return super().prepare(self.unit(query), self.unit(key), chunk)

    def transition(self, inputs: Inputs) -> Tensor:
        """See `RecurrentMixer.transition`: the product over tokens of a_t (I - b_t k_t k_t^T), less I."""
        # nobody asks: there are no queries
        unasked = replace(inputs, query=inputs.query[:, :, :0])
        found = None
        for begin in range(0, inputs.tokens, self.inner_chunk):
            part = self.unrolled(unasked.part(slice(begin, begin + self.inner_chunk))).transition
            assert part is not None
            found = part if found is None else part + passed(part, found)
        assert found is not None
        return found

    @property
    def gated(self) -> tuple[bool, bool]:
        """See `MatrixMixer.gated`."""
        return self.decay is not None, True

    def gates(self, x: Tensor) -> dict[str, Tensor]:
        """Return `rate`, and `log_decay` [batch, local kv_heads, tokens] of tokens x [tokens, batch, hidden_size]."""
        found = {"rate": self.rate(x).sigmoid()}
        return found if self.decay is None else {**found, "log_decay": self.decay(x)}
