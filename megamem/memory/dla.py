"""Deep linear attention (DLA): a network per head that moves towards each value along the dot product.

Paper 004 (Memory Caching), equation 10, with the loss -<M(k), v>: its sign there would unlearn. With a matrix of zeros
for a network, no residual and rate 1 it is linear attention.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from megamem.config.model import ModelConfig
from megamem.config.registry import register_mixer
from megamem.memory.deep import DeepConfig, DeepMemory
from megamem.ops.deep_memory import Loss
from megamem.parallel.linears import Linears

FIRST_DECAY = 4.6
"""Before the sigmoid: a memory fades by 1 % per token."""


@register_mixer
class DLAConfig(DeepConfig):
    """Deep linear attention: a small network per head, trained on the dot product of its answer and the value."""

    kind: Literal["dla"] = "dla"
    """`dla`"""
    loss: ClassVar[Loss] = "dot"
    decay: bool = False
    """Fade the network's weights at a pace of each token and head."""

    def gate_starts(self) -> dict[str, float]:
        """See `DeepConfig.gate_starts`."""
        return {**super().gate_starts(), **({"log_decay": FIRST_DECAY} if self.decay else {})}

    def build(self, model: ModelConfig, linears: Linears, layer: int) -> DeepMemory:
        """See `MixerConfig.build`."""
        return DeepMemory(self, model, linears)
