"""Titans' long-term memory module (LMM): a network per head that learns each value from its key, with momentum.

Behrouz, Zhong and Mirrokni, "Titans: Learning to Memorize at Test Time", 2024, equations 11 to 15: l = |M(k) - v|^2,
S_t = e_t S_{t-1} - b_t grad l and M_t = a_t M_{t-1} + S_t, with rate b, momentum e and decay a (the paper's 1 - alpha)
of each token and head.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from megamem.config.model import MIXERS, ModelConfig
from megamem.memory.recurrent.deep import DeepMemory
from megamem.memory.recurrent.deep_config import DeepConfig
from megamem.ops.deep_memory.error import Loss
from megamem.parallel.linears import Linears

FIRST_MOMENTUM = 0.0
"""Start value of the momentum gate before its sigmoid: half of a step's direction goes on in the next."""


@MIXERS.register
class TitansConfig(DeepConfig):
    """Titans: a small network per head, trained on the text's keys and values with momentum and forgetting."""

    kind: Literal["titans"] = "titans"
    """`titans`"""
    mergeable: ClassVar[bool] = True
    loss: ClassVar[Loss] = "l2"
    momentum: bool = True
    """Let past gradients go on acting, with a momentum of each token and head."""
    decay: bool = True
    """Fade the network's weights at a rate of each token and head."""

    def gate_starts(self) -> dict[str, float]:
        """See `DeepConfig.gate_starts`."""
        starts = super().gate_starts()
        if self.momentum:
            starts["log_momentum"] = FIRST_MOMENTUM
        return starts

    def has_momentum(self) -> bool:
        """See `DeepConfig.has_momentum`."""
        return self.momentum

    def build(self, model: ModelConfig, linears: Linears, layer: int) -> DeepMemory:
        """See `MixerConfig.build`."""
        return DeepMemory(self, model, linears)
