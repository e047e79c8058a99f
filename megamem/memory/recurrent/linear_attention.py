"""Linear attention: a matrix per head, the sum of k v^T over all tokens so far.

Katharopoulos et al., "Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention", 2020, equations
16 to 20; without their normalizer, in the form that Memory Caching compares: the norm of what is read takes its place.

    S_t = S_{t-1} + f(k_t) v_t^T,   y_t = S_t^T f(q_t) / sqrt(d)
"""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from megamem.config.model import MIXERS, ModelConfig
from megamem.memory.base import Chunk
from megamem.memory.recurrent.matrix import MatrixConfig, MatrixMixer
from megamem.parallel.linears import Linears


@MIXERS.register
class LinearAttentionConfig(MatrixConfig):
    """Linear attention: the sum of the outer products of all keys and values, read by the query."""

    kind: Literal["linear_attention"] = "linear_attention"
    """`linear_attention`"""
    features: Literal["identity", "elu"] = "identity"
    """Feature map f of queries and keys: the identity, or ELU + 1, which keeps every weight positive."""

    def build(self, model: ModelConfig, linears: Linears, layer: int) -> LinearAttention:
        """See `MixerConfig.build`."""
        return LinearAttention(self, model, linears)


class LinearAttention(MatrixMixer):
    """A matrix memory that is the sum of all k v^T."""

    def __init__(self, config: LinearAttentionConfig, model: ModelConfig, linears: Linears) -> None:
        super().__init__(config, model, linears)
        self.positive = config.features == "elu"

    def prepare(self, query: Tensor, key: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """See `RecurrentMixer.prepare`: the feature map."""
        if self.positive:
            query, key = F.elu(query) + 1, F.elu(key) + 1
        return super().prepare(query, key, chunk)
