"""Local attention: causal softmax attention within blocks of tokens, without a memory."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from megamem.config.cost import Flops
from megamem.config.model import MIXERS, MixerConfig, ModelConfig
from megamem.memory.base import StateSpec
from megamem.memory.shared.block_attention import (
    BlockAttention,
    local_attention_flops,
    open_specs,
    resolve_block,
)
from megamem.parallel.linears import Linears


@MIXERS.register
class LocalAttentionConfig(MixerConfig):
    """Causal attention inside blocks; nothing passes from block to block (Transformer++ without a memory)."""

    kind: Literal["local_attention"] = "local_attention"
    """`local_attention`"""
    block: PositiveInt | None = None
    """Tokens a block spans; the chunk if not given. Divides model.chunk_size."""

    def check(self, model: ModelConfig) -> None:
        """See `MixerConfig.check`."""
        resolve_block(self.block, model)

    def state_specs(self, model: ModelConfig) -> StateSpec:
        """See `MixerConfig.state_specs`: only the unfinished block of token-by-token decoding."""
        return open_specs(model)

    def query_key_norms(self) -> int:
        """See `MixerConfig.query_key_norms`."""
        return 1

    def mixing_flops(self, model: ModelConfig, sequence_length: int, causal: bool) -> dict[str, Flops]:
        """See `MixerConfig.mixing_flops`: attention within a block."""
        return local_attention_flops(resolve_block(self.block, model), model, sequence_length, causal)

    def build(self, model: ModelConfig, linears: Linears, layer: int) -> BlockAttention:
        """See `MixerConfig.build`."""
        return BlockAttention(model, linears, self.state_specs(model), resolve_block(self.block, model))
