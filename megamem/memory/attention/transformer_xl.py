"""Transformer-XL: attention within the chunk and to cached hidden states of the chunks before it.

Dai et al., "Transformer-XL: Attentive Language Models beyond a Fixed-Length Context", 2019. Its segment is the chunk.
A query sees the tokens of its chunk up to itself and the `memory_length` tokens before the chunk:

    K, V   = W_k [stop(m); h], W_v [stop(m); h]          m: the newest hidden states before the chunk
    A_ij   = ((q_i + u) . k_j + (q_i + v) . W_r s_(i-j)) / sqrt(d)
    m'     = the newest `memory_length` of [m; h]

The memory holds what the layer was given, so that each layer reaches one memory length further back than the one
below it. Gradients stop at the memory; the projections learn from reading it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from megamem.config.cost import Flops
from megamem.config.model import MIXERS, MixerConfig, ModelConfig
from megamem.memory.base import StateSpec
from megamem.memory.shared.segment_attention import (
    SegmentAttention,
    bias_parameters,
    segment_flops,
    segment_parameters,
    segment_specs,
)
from megamem.parallel.linears import Linears


@MIXERS.register
class TransformerXLConfig(MixerConfig):
    """Attention to the chunk and to the hidden states of the tokens before it, by content and by distance."""

    kind: Literal["transformer_xl"] = "transformer_xl"
    """`transformer_xl`"""
    memory_length: NonNegativeInt | None = None
    """Tokens before the chunk whose hidden states are kept; as many as the chunk has if not given; 0: no memory, which
    leaves attention within the chunk with positions by distance."""
    same_length: bool = False
    """Every query sees the same number of keys, `memory_length` with its own, wherever in the chunk it stands."""
    clamp_length: PositiveInt | None = None
    """Distances beyond are taken for this one: for a memory that is longer than in training."""
    shared_biases: bool = False
    """Whether all layers share one pair of u and v, as in the paper's experiments; if not, each has its own."""

    def resolved(self, model: ModelConfig) -> int:
        """Return the number of tokens in the memory."""
        return model.chunk_size if self.memory_length is None else self.memory_length

    def check(self, model: ModelConfig) -> None:
        """See `MixerConfig.check`."""
        super().check(model)
        if self.same_length and self.memory_length == 0:
            raise ValueError("same_length: with memory_length 0 queries would see nothing; use 1 or more")

    def state_specs(self, model: ModelConfig) -> StateSpec:
        """Declare the memory and the open chunk's hidden states."""
        return segment_specs(self.resolved(model))

    def shared_parameters(self, model: ModelConfig) -> int:
        """See `MixerConfig.shared_parameters`."""
        return bias_parameters(model) if self.shared_biases else 0

    def rotates(self) -> bool:
        """See `MixerConfig.rotates`: positions are distances."""
        return False

    def query_key_norms(self) -> int:
        """See `MixerConfig.query_key_norms`."""
        return 1

    def mixing_flops(self, model: ModelConfig, sequence_length: int, causal: bool) -> dict[str, Flops]:
        """See `MixerConfig.mixing_flops`."""
        length = self.resolved(model)
        window = length if self.same_length else None
        return segment_flops(model, sequence_length, causal, lambda begin: min(begin, length), window)

    def extra_parameters(self, model: ModelConfig) -> int:
        """Count the projection of distances, u and v."""
        return segment_parameters(model)

    def build(self, model: ModelConfig, linears: Linears, layer: int) -> SegmentAttention:
        """See `MixerConfig.build`."""
        return SegmentAttention(
            model,
            linears,
            self.state_specs(model),
            memory_length=self.resolved(model),
            same_length=self.same_length,
            clamp_length=self.clamp_length,
            shares_biases=self.shared_biases,
        )
