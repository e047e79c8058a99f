"""Linear attention: a matrix per head, the sum of k v^T over all tokens so far.

Katharopoulos et al., "Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention", 2020, equations
16 to 20, and Behrouz et al., "Memory Caching: RNNs with Growing Memory", equation 2:

    S_t = S_{t-1} + f(k_t) v_t^T,   y_t = S_t^T f(q_t) / sqrt(d)

or, with the normalizer, the mean of all values with the weights f(q_t) . f(k_i):

    z_t = z_{t-1} + f(k_t),   y_t = S_t^T f(q_t) / (z_t . f(q_t))

z is kept as one more column of S, as though each value had one more channel, which is 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from megamem.config.model import MIXERS, ModelConfig
from megamem.memory.base import Chunk, State
from megamem.memory.recurrent.base import Inputs
from megamem.memory.recurrent.matrix import MatrixConfig, MatrixMixer
from megamem.ops.deep_memory.kept import Matrix, Rows
from megamem.ops.deep_memory.network import Join
from megamem.parallel.linears import Linears


@MIXERS.register
class LinearAttentionConfig(MatrixConfig):
    """Linear attention: the sum of the outer products of all keys and values, read by the query."""

    kind: Literal["linear_attention"] = "linear_attention"
    """`linear_attention`"""
    features: Literal["identity", "elu"] = "identity"
    """Feature map f of queries and keys: the identity, or ELU + 1, which keeps every weight positive."""
    normalizer: bool = False
    """Divide what a query reads by the sum of its weights, as the papers' equations do. Needs `features: elu`. The norm
    of what is read undoes it again, except where a layer reads several memories, each with a sum of its own."""

    def check(self, model: ModelConfig) -> None:
        """See `MixerConfig.check`."""
        super().check(model)
        if self.normalizer and self.features != "elu":
            raise ValueError(
                f"normalizer true divides by a sum of weights, which features {self.features} lets be zero; use elu"
            )

    def columns(self, model: ModelConfig) -> int:
        """See `MatrixConfig.columns`; the last is z."""
        return super().columns(model) + self.normalizer

    def answers_add_up(self) -> bool:
        """See `RecurrentConfig.answers_add_up`: not with a normalizer for each memory."""
        return not self.normalizer

    def build(self, model: ModelConfig, linears: Linears, layer: int) -> LinearAttention:
        """See `MixerConfig.build`."""
        return LinearAttention(self, model, linears)


class LinearAttention(MatrixMixer):
    """A matrix memory that is the sum of all k v^T."""

    def __init__(self, config: LinearAttentionConfig, model: ModelConfig, linears: Linears) -> None:
        super().__init__(config, model, linears)
        self.positive = config.features == "elu"
        self.normalizer = config.normalizer

    @property
    def gated(self) -> tuple[bool, bool]:
        """See `MatrixMixer.gated`."""
        return False, False

    def prepare(self, query: Tensor, key: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """See `RecurrentMixer.prepare`: the feature map."""
        if self.positive:
            query, key = F.elu(query) + 1, F.elu(key) + 1
        return super().prepare(query, key, chunk)

    def recur(self, inputs: Inputs, memory: State, chunk: Chunk, join: Join | None = None) -> tuple[Tensor, State]:
        """See `RecurrentMixer.recur`."""
        if not self.normalizer:
            return super().recur(inputs, memory, chunk, join)
        counted = replace(inputs, value=F.pad(inputs.value, (0, 1), value=1.0))
        read, after = super().recur(counted, memory, chunk, join)
        return _normalized(read), after

    def answer_all(self, query: Tensor, matrices: Tensor, shares: Tensor) -> Tensor:
        """See `MatrixMixer.answer_all`: each memory's answer ([B, H, G, T, V]) is divided by its own normalizer."""
        if not self.normalizer:
            return super().answer_all(query, matrices, shares)
        # z_n . q of each query and memory, [B, H, G, T, N]
        sums = query @ matrices[..., -1].mT[:, :, None]
        return super().answer_all(query, matrices[..., :-1], shares / _positive(sums))

    def answer_rows(self, x: Tensor, kept: Sequence[Matrix], rows: Rows) -> Tensor:
        """See `RecurrentMixer.answer_rows`."""
        made = super().answer_rows(x, kept, rows)
        return _normalized(made) if self.normalizer else made


_LEAST = 2.0**10
"""Sums of weights below so many of the smallest numbers count as zero, so that shares over them are finite."""


def _normalized(read: Tensor) -> Tensor:
    """Return what is read without its last channel, divided by it: [..., V + 1] -> [..., V]."""
    return read[..., :-1] / _positive(read[..., -1:])


def _positive(sums: Tensor) -> Tensor:
    """Return sums of positive weights [...], with ones in the place of those of no token at all, which are zero.

    (The smallest of numbers would not do: gates of log-linear attention divided by it are infinite.)
    """
    return torch.where(sums > _LEAST * torch.finfo(sums.dtype).tiny, sums, 1.0)
