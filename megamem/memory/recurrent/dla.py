"""Deep linear attention (DLA): a network per head that moves towards each value along the dot product.

Behrouz et al., "Memory Caching: RNNs with Growing Memory", equation 10, with the loss -<M(k), v>: the sign that is
printed there would unlearn. With a matrix of zeros for a network, no residual and rate 1 it is linear attention
(equation 11).
"""

from __future__ import annotations

from typing import ClassVar, Literal

from megamem.config.model import MIXERS, ModelConfig
from megamem.memory.recurrent.deep import DeepMemory
from megamem.memory.recurrent.deep_config import DeepConfig
from megamem.ops.deep_memory.error import Loss
from megamem.parallel.linears import Linears


@MIXERS.register
class DLAConfig(DeepConfig):
    """Deep linear attention: a small network per head, trained on the dot product of its answer and the value."""

    kind: Literal["dla"] = "dla"
    """`dla`"""
    mergeable: ClassVar[bool] = True
    loss: ClassVar[Loss] = "dot"

    def build(self, model: ModelConfig, linears: Linears, layer: int) -> DeepMemory:
        """See `MixerConfig.build`."""
        return DeepMemory(self, model, linears)
