"""Mixers one after the other in the same layer, each with a norm and a residual of its own.

    y_1 = m_1(x),   y_n = y_{n-1} + m_n(norm(x + y_{n-1}))

With Titans before sliding-window attention this is Titans' "memory as a layer" (MAL; Behrouz, Zhong and Mirrokni,
"Titans: Learning to Memorize at Test Time", 2024).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, cast

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from megamem.config.model import MIXERS, AnyMixer, MixerConfig, ModelConfig
from megamem.memory.base import Chunk, Losses, Mixer, State, StateSpec
from megamem.memory.composite.several import Several, SeveralConfig
from megamem.parallel.linears import Linears


@MIXERS.register
class SequentialConfig(SeveralConfig):
    """Several mixers one after the other in one layer: Titans-MAL is titans before sliding_attention."""

    kind: Literal["sequential"] = "sequential"
    """`sequential`"""
    mixers: Annotated[list[AnyMixer], Field(min_length=2)]
    """The mixers, first to last, each with its own fields."""

    @property
    def parts(self) -> Mapping[str, MixerConfig]:
        """See `SeveralConfig.parts`: `0`, `1` and so on."""
        return {str(number): mixer for number, mixer in enumerate(self.mixers)}

    def build(self, model: ModelConfig, linears: Linears, layer: int) -> Sequential:
        """See `MixerConfig.build`."""
        mixers = [mixer.build(model, linears, layer) for mixer in self.mixers]
        return Sequential(mixers, self.state_specs(model), linears.tp_size, model.norm_eps)


class Sequential(Several):
    """Mixers that each read what those before have added.

    The norms between them have no weights, as projections follow.
    """

    def __init__(self, mixers: list[Mixer], specs: StateSpec, tp_size: int, eps: float) -> None:
        parts = {str(number): mixer for number, mixer in enumerate(mixers)}
        super().__init__(parts, {part: f"mixers.{part}" for part in parts}, specs, tp_size)
        self.mixers = nn.ModuleList(mixers)
        self.eps = eps

    def forward(self, hidden: Tensor, state: State, chunk: Chunk) -> tuple[Tensor, State, Losses]:
        """See `Mixer.forward`."""
        total, new = None, dict(state)
        losses: Losses = {}
        for i, mixer in enumerate(self.mixers):
            x = hidden if total is None else F.rms_norm(hidden + total, hidden.shape[-1:], eps=self.eps)
            out, after, of_mixer = self.read_part(str(i), cast(Mixer, mixer), x, state, chunk)
            total = out if total is None else total + out
            new |= after
            losses |= of_mixer
        assert total is not None
        return total, new, losses
