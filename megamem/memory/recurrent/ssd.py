"""SSD, the layer of Mamba-2: a matrix per head that fades at a rate each token chooses, with a skip past the memory.

Dao and Gu, "Transformers are SSMs", 2024, with each head's own keys (B there) and queries (C there), not shared over
groups, and the norm and gate of the other recurrent memories.

    S_t = exp(-d_t exp(A)) S_{t-1} + d_t k_t v_t^T,   y_t = S_t^T q_t / sqrt(w) + D v_t,   d_t = softplus(w_d . x_t + c)
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megamem.config.model import MIXERS, ModelConfig
from megamem.memory.recurrent.base import Inputs, TokenGate
from megamem.memory.recurrent.matrix import MatrixConfig, MatrixMixer
from megamem.parallel.linears import Linears, constant, declare

FIRST_STEP = math.log(math.expm1(0.01))
"""Start value of c: with A = 0 a memory fades by 1 % per token, and takes in 1 % of it."""


@MIXERS.register
class SSDConfig(MatrixConfig):
    """SSD (Mamba-2): outer products that fade at a rate of each token and head, with a skip from value to output."""

    kind: Literal["ssd"] = "ssd"
    """`ssd`"""

    def token_gates(self) -> int:
        """See `RecurrentConfig.token_gates`: the step."""
        return 1

    def extra_parameters(self, model: ModelConfig) -> int:
        """Count convolutions and norm; start value of the step, A and D."""
        return super().extra_parameters(model) + 3 * model.resolved_kv_heads

    def transition_size(self, model: ModelConfig) -> int:
        """See `RecurrentConfig.transition_size`: the product of decays."""
        return 1

    def build(self, model: ModelConfig, linears: Linears, layer: int) -> SSD:
        """See `MixerConfig.build`."""
        return SSD(self, model, linears)


class HeadValue(nn.Module):
    """A learned number per key/value head."""

    def __init__(self, model: ModelConfig, linears: Linears, start: float) -> None:
        super().__init__()
        self.value = declare(
            nn.Parameter(torch.empty(model.resolved_kv_heads // linears.tp_size)), constant(start), shard_axis=0
        )

    def forward(self, like: Tensor) -> Tensor:
        """Return the numbers [local kv_heads], in the dtype of `like` [..., tokens]."""
        return self.value.to(like.dtype)


class SSD(MatrixMixer):
    """A matrix memory with a step and a decay of each token."""

    def __init__(self, config: SSDConfig, model: ModelConfig, linears: Linears) -> None:
        super().__init__(config, model, linears)
        self.token_step = TokenGate(model, linears, FIRST_STEP)
        self.log_pace = HeadValue(model, linears, 0.0)
        self.skip = HeadValue(model, linears, 1.0)

    @property
    def gated(self) -> tuple[bool, bool]:
        """See `MatrixMixer.gated`."""
        return True, False

    def gates(self, x: Tensor) -> dict[str, Tensor]:
        """Return `step` and `log_decay` [batch, local kv_heads, tokens] of tokens x [tokens, batch, hidden_size]."""
        step = F.softplus(self.token_step(x))
        return {"step": step, "log_decay": -self.log_pace(step).exp()[:, None] * step}

    def written(self, inputs: Inputs) -> Tensor:
        """See `MatrixMixer.written`: each value times its token's step."""
        step = inputs.gates["step"]
        return inputs.value.to(step.dtype) * step[..., None]

    def finish(self, read: Tensor, x: Tensor, inputs: Inputs) -> Tensor:
        """See `RecurrentMixer.finish`; D v_t joins what was read, also where kept memories were read too."""
        value = inputs.value.to(read.dtype)
        return super().finish(read + (self.skip(value)[:, None, None] * value)[:, :, None], x, inputs)
