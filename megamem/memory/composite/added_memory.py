"""A memory added beside attention in the same layer, with projections of its own.

    y = attention(x) + memory(x)

Both read the layer's normalized input, and their outputs are added, as in heads of attention and of a state-space
model side by side (Dong et al., "Hymba: A Hybrid-head Architecture for Small Language Models", 2024), without that
paper's norms and scales, so that the output of attention stays as it is. With `output_init: zero` the memory's
projection back into the residual stream starts at zero, as in low-rank adaptation (Hu et al., "LoRA", 2021, section
4.1): the layer computes attention alone until that projection has moved, which has a gradient from the first step on.
Any mixer with such a projection can be added so to a pretrained model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from pydantic import Field
from torch import Tensor, nn

from megamem.config.model import MIXERS, AnyMixer, MixerConfig, ModelConfig
from megamem.errors import ConfigError
from megamem.memory.base import Chunk, Losses, Mixer, State, StateSpec
from megamem.memory.composite.several import Several, SeveralConfig
from megamem.parallel.linears import Linears, constant, info


@MIXERS.register
class AddedMemoryConfig(SeveralConfig):
    """Attention, and beside it a memory with projections of its own whose output is added."""

    kind: Literal["added_memory"] = "added_memory"
    """`added_memory`"""
    attention: AnyMixer = Field(default="local_attention", validate_default=True)
    """The attention that the memory is added to."""
    memory: AnyMixer
    """The memory: any mixer that takes no side rows."""
    output_init: Literal["normal", "zero"] = "normal"
    """How the memory's projection back into the residual stream starts: `normal` as others; at `zero` the memory adds \
nothing until it has learned to, as a memory that is added to a pretrained model should."""

    @property
    def parts(self) -> Mapping[str, MixerConfig]:
        """See `SeveralConfig.parts`: `attention` and `memory`."""
        return {"attention": self.attention, "memory": self.memory}

    def build(self, model: ModelConfig, linears: Linears, layer: int) -> AddedMemory:
        """See `MixerConfig.build`."""
        attention, memory = (mixer.build(model, linears, layer) for mixer in self.parts.values())
        if self.output_init == "zero" and not start_at_zero(memory):
            raise ConfigError(
                f"layer {layer}: added_memory: {self.memory.kind} has no projection of its own back into the layer's "
                "output that output_init: zero could start at zero"
            )
        return AddedMemory(attention, memory, self.state_specs(model), linears.tp_size)


def start_at_zero(memory: nn.Module) -> bool:
    """Let the projections back into the residual stream start at zero: what `Linears.row` has made.

    They alone are split over ranks by what they sum over. Returns: whether there are any.
    """
    found = False
    for parameter in memory.parameters():
        declared = info(parameter)
        if declared.fan_in is not None and declared.fan_in == declared.shard_axis:
            parameter.info = replace(declared, init=constant(0.0))  # type: ignore[attr-defined]
            found = True
    return found


class AddedMemory(Several):
    """Attention and a memory that read the same tokens."""

    def __init__(self, attention: Mixer, memory: Mixer, specs: StateSpec, tp_size: int) -> None:
        parts = {"attention": attention, "memory": memory}
        super().__init__(parts, {part: part for part in parts}, specs, tp_size)
        self.attention, self.memory = attention, memory

    def forward(self, hidden: Tensor, state: State, chunk: Chunk) -> tuple[Tensor, State, Losses]:
        """See `Mixer.forward`."""
        attended, of_attention, losses = self.read_part("attention", self.attention, hidden, state, chunk)
        recalled, of_memory, further = self.read_part("memory", self.memory, hidden, state, chunk)
        return attended + recalled, {**state, **of_attention, **of_memory}, {**losses, **further}
