"""RetNet's retention: linear attention that forgets, each head at its own fixed rate.

Sun et al., "Retentive Network: A Successor to Transformer for Large Language Models", 2023, equations 6 and 8, with
the rotation of queries and keys for its complex exponential.

    S_t = a_h S_{t-1} + k_t v_t^T,   y_t = S_t^T q_t / sqrt(d),   a_h = 1 - 2^(-5 - h), h = 0, 1, ...
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import PositiveInt
from torch import Tensor

from megamem.config.model import MIXERS, ModelConfig
from megamem.memory.base import Chunk, state_dtype, to_device
from megamem.memory.recurrent.matrix import MatrixConfig, MatrixMixer
from megamem.memory.shared.blocks import rotation_of, row_rotary_tables
from megamem.ops.rotary import apply_rotary
from megamem.parallel.linears import Linears


@MIXERS.register
class RetNetConfig(MatrixConfig):
    """RetNet: a decaying sum of outer products, the decay fixed per head; rotary positions, no convolution."""

    kind: Literal["retnet"] = "retnet"
    """`retnet`"""
    convolution: PositiveInt = 1
    """Tokens that the short convolutions of queries, keys and values span, the present one included; a SiLU follows.
    1: neither convolution nor SiLU, as in the paper."""
    expand_v: PositiveInt = 2
    """Width of a head's values over that of its keys."""

    def rotates(self) -> bool:
        """See `MixerConfig.rotates`."""
        return True

    def transition_size(self, model: ModelConfig) -> int:
        """See `RecurrentConfig.transition_size`: the product of decays."""
        return 1

    def build(self, model: ModelConfig, linears: Linears, layer: int) -> RetNet:
        """See `MixerConfig.build`."""
        return RetNet(self, model, linears)


class RetNet(MatrixMixer):
    """Retention with one decay per head."""

    def __init__(self, config: RetNetConfig, model: ModelConfig, linears: Linears) -> None:
        super().__init__(config, model, linears)
        self.rotation = rotation_of(model)
        local = model.resolved_kv_heads // linears.tp_size
        # the index among all heads: a second tensor-parallel rank does not begin with the first decay again
        self.first = linears.tp_rank * local
        self.local = local

    def prepare(self, query: Tensor, key: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """See `RecurrentMixer.prepare`: queries and keys rotated by their positions in the document."""
        tables = row_rotary_tables(chunk, query.shape[0], self.width, self.rotation, query)
        return super().prepare(apply_rotary(query, *tables), apply_rotary(key, *tables), chunk)

    @property
    def gated(self) -> tuple[bool, bool]:
        """See `MatrixMixer.gated`."""
        return True, False

    def gates(self, x: Tensor) -> dict[str, Tensor]:
        """Return the logarithm of each head's decay, the same for every token of x [tokens, batch, hidden_size].

        `log_decay` is [1, local kv_heads, tokens].
        """
        heads = range(self.first, self.first + self.local)
        logs = torch.log1p(-torch.exp2(torch.tensor([-5.0 - head for head in heads], dtype=torch.float64)))
        decay = to_device(logs, x.device, state_dtype(x.dtype))
        return {"log_decay": decay[None, :, None].expand(1, -1, x.shape[0])}
