"""What mixers share that are made of several others in one layer: all declarations are those of their parts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from torch import Tensor

from megamem.config.cost import Flops
from megamem.config.model import MixerConfig, ModelConfig
from megamem.memory.base import Chunk, Losses, Mixer, State, StateSpec


class SeveralConfig(MixerConfig):
    """A mixer made of others. States and losses of a part have its name and an underscore before theirs."""

    @property
    @abstractmethod
    def parts(self) -> Mapping[str, MixerConfig]:
        """The mixers by name, in the order in which they read."""

    def check(self, model: ModelConfig) -> None:
        """See `MixerConfig.check`."""
        for mixer in self.parts.values():
            mixer.check(model)
            if mixer.side_rows(model) is not None:
                raise ValueError(f"{self.kind} carries no side rows, which {mixer.kind} takes up the layers")

    def state_specs(self, model: ModelConfig) -> StateSpec:
        """Declare the states of all mixers."""
        return {
            f"{part}_{name}": spec
            for part, mixer in self.parts.items()
            for name, spec in mixer.state_specs(model).items()
        }

    def mixing_flops(self, model: ModelConfig, sequence_length: int, causal: bool) -> dict[str, Flops]:
        """See `MixerConfig.mixing_flops`."""
        total: dict[str, Flops] = {}
        for mixer in self.parts.values():
            for name, flops in mixer.mixing_flops(model, sequence_length, causal).items():
                total[name] = total[name] + flops if name in total else flops
        return total

    def projection_parameters(self, model: ModelConfig) -> int:
        """See `MixerConfig.projection_parameters`."""
        return sum(mixer.projection_parameters(model) for mixer in self.parts.values())

    def projection_biases(self, model: ModelConfig) -> int:
        """See `MixerConfig.projection_biases`."""
        return sum(mixer.projection_biases(model) for mixer in self.parts.values())

    def extra_parameters(self, model: ModelConfig) -> int:
        """See `MixerConfig.extra_parameters`."""
        return sum(mixer.extra_parameters(model) for mixer in self.parts.values())

    def auxiliary_losses(self) -> tuple[str, ...]:
        """See `MixerConfig.auxiliary_losses`."""
        return tuple(f"{part}_{name}" for part, mixer in self.parts.items() for name in mixer.auxiliary_losses())

    def rotates(self) -> bool:
        """See `MixerConfig.rotates`."""
        return any(mixer.rotates() for mixer in self.parts.values())

    def shared_parameters(self, model: ModelConfig) -> int:
        """See `MixerConfig.shared_parameters`."""
        return sum(mixer.shared_parameters(model) for mixer in self.parts.values())

    def query_key_norms(self) -> int:
        """See `MixerConfig.query_key_norms`."""
        return sum(mixer.query_key_norms() for mixer in self.parts.values())

    def training_window(self, model: ModelConfig) -> int:
        """See `MixerConfig.training_window`."""
        return max(mixer.training_window(model) for mixer in self.parts.values())

    def summary(self, model: ModelConfig, sequence_length: int) -> str | None:
        """See `MixerConfig.summary`."""
        texts = (mixer.summary(model, sequence_length) for mixer in self.parts.values())
        return "; ".join(text for text in texts if text) or None


class Several(Mixer):
    """A mixer made of others. How they read one after the other is for subclasses to say."""

    def __init__(self, parts: Mapping[str, Mixer], places: Mapping[str, str], specs: StateSpec, tp_size: int) -> None:
        """Take the parts, which subclasses keep as modules.

        Args:
            parts: the mixers by name.
            places: where each lies in the module, by its name.
            specs: see `SeveralConfig.state_specs`.
            tp_size: number of tensor-parallel ranks.
        """
        super().__init__(specs, next(iter(parts.values())).sizes, tp_size)
        self.differentiable_state = all(mixer.differentiable_state for mixer in parts.values())
        self.reads_borders = all(mixer.reads_borders for mixer in parts.values())
        self.trained_by = {
            f"{part}_{loss}": f"{places[part]}.{module}"
            for part, mixer in parts.items()
            for loss, module in mixer.trained_by.items()
        }

    def read_part(
        self, part: str, mixer: Mixer, hidden: Tensor, state: State, chunk: Chunk
    ) -> tuple[Tensor, State, Losses]:
        """Return what `mixer`, the part of this name, makes of hidden [tokens, batch, hidden_size]; see `forward`.

        state, and what is returned of it: the tensors of all parts, and the new ones of this part alone.
        """
        prefix = f"{part}_"
        own = {name.removeprefix(prefix): tensors for name, tensors in state.items() if name.startswith(prefix)}
        out, after, losses = mixer(hidden, own, chunk.inside(prefix))
        return (
            out,
            {f"{prefix}{name}": tensors for name, tensors in after.items()},
            {f"{prefix}{name}": loss for name, loss in losses.items()},
        )
