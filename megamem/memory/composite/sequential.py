"""Mixers one after the other in the same layer, each with a norm and a residual of its own.

    y_1 = m_1(x),   y_n = y_{n-1} + m_n(norm(x + y_{n-1}))

With Titans before sliding-window attention this is Titans' "memory as a layer" (MAL; Behrouz, Zhong and Mirrokni,
"Titans: Learning to Memorize at Test Time", 2024).
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from megamem.config.cost import Flops
from megamem.config.model import MIXERS, AnyMixer, MixerConfig, ModelConfig
from megamem.memory.base import Chunk, Losses, Mixer, State, StateSpec
from megamem.parallel.linears import Linears


@MIXERS.register
class SequentialConfig(MixerConfig):
    """Several mixers one after the other in one layer: Titans-MAL is titans before sliding_attention."""

    kind: Literal["sequential"] = "sequential"
    """`sequential`"""
    mixers: Annotated[list[AnyMixer], Field(min_length=2)]
    """The mixers, first to last, each with its own fields."""

    def check(self, model: ModelConfig) -> None:
        """See `MixerConfig.check`."""
        for mixer in self.mixers:
            mixer.check(model)
            if mixer.side_rows(model) is not None:
                raise ValueError(f"sequential carries no side rows, which {mixer.kind} takes up the layers")

    def state_specs(self, model: ModelConfig) -> StateSpec:
        """Declare the states of all mixers, with `0_` before the names of the first."""
        return {f"{i}_{name}": s for i, mixer in enumerate(self.mixers) for name, s in mixer.state_specs(model).items()}

    def mixing_flops(self, model: ModelConfig, sequence_length: int, causal: bool) -> dict[str, Flops]:
        """See `MixerConfig.mixing_flops`."""
        parts: dict[str, Flops] = {}
        for mixer in self.mixers:
            for name, flops in mixer.mixing_flops(model, sequence_length, causal).items():
                parts[name] = parts[name] + flops if name in parts else flops
        return parts

    def projection_parameters(self, model: ModelConfig) -> int:
        """See `MixerConfig.projection_parameters`."""
        return sum(mixer.projection_parameters(model) for mixer in self.mixers)

    def projection_biases(self, model: ModelConfig) -> int:
        """See `MixerConfig.projection_biases`."""
        return sum(mixer.projection_biases(model) for mixer in self.mixers)

    def extra_parameters(self, model: ModelConfig) -> int:
        """See `MixerConfig.extra_parameters`."""
        return sum(mixer.extra_parameters(model) for mixer in self.mixers)

    def auxiliary_losses(self) -> tuple[str, ...]:
        """See `MixerConfig.auxiliary_losses`: with `0_` before those of the first."""
        return tuple(f"{i}_{name}" for i, mixer in enumerate(self.mixers) for name in mixer.auxiliary_losses())

    def rotates(self) -> bool:
        """See `MixerConfig.rotates`."""
        return any(mixer.rotates() for mixer in self.mixers)

    def shared_parameters(self, model: ModelConfig) -> int:
        """See `MixerConfig.shared_parameters`."""
        return sum(mixer.shared_parameters(model) for mixer in self.mixers)

    def query_key_norms(self) -> int:
        """See `MixerConfig.query_key_norms`."""
        return sum(mixer.query_key_norms() for mixer in self.mixers)

    def training_window(self, model: ModelConfig) -> int:
        """See `MixerConfig.training_window`."""
        return max(mixer.training_window(model) for mixer in self.mixers)

    def summary(self, model: ModelConfig, sequence_length: int) -> str | None:
        """See `MixerConfig.summary`."""
        return "; ".join(text for m in self.mixers if (text := m.summary(model, sequence_length))) or None

    def build(self, model: ModelConfig, linears: Linears, layer: int) -> Sequential:
        """See `MixerConfig.build`."""
        mixers = [mixer.build(model, linears, layer) for mixer in self.mixers]
        return Sequential(mixers, self.state_specs(model), linears.tp_size, model.norm_eps)


class Sequential(Mixer):
    """Mixers that each read what those before have added.

    The norms between them have no weights, as projections follow.
    """

    def __init__(self, mixers: list[Mixer], specs: StateSpec, tp_size: int, eps: float) -> None:
        super().__init__(specs, mixers[0].sizes, tp_size)
        self.mixers = nn.ModuleList(mixers)
        self.differentiable_state = all(mixer.differentiable_state for mixer in mixers)
        self.reads_borders = all(mixer.reads_borders for mixer in mixers)
        self.trained_by = {
            f"{i}_{loss}": f"mixers.{i}.{module}"
            for i, mixer in enumerate(mixers)
            for loss, module in mixer.trained_by.items()
        }
        self.eps = eps

    def forward(self, hidden: Tensor, state: State, chunk: Chunk) -> tuple[Tensor, State, Losses]:
        """See `Mixer.forward`."""
        total, new = None, dict(state)
        losses: Losses = {}
        for i, mixer in enumerate(self.mixers):
            prefix = f"{i}_"
            own = {name.removeprefix(prefix): part for name, part in state.items() if name.startswith(prefix)}
            x = hidden if total is None else F.rms_norm(hidden + total, hidden.shape[-1:], eps=self.eps)
            out, after, of_mixer = mixer(x, own, chunk.inside(prefix))
            total = out if total is None else total + out
            new |= {f"{prefix}{name}": part for name, part in after.items()}
            losses |= {f"{prefix}{name}": loss for name, loss in of_mixer.items()}
        assert total is not None
        return total, new, losses
