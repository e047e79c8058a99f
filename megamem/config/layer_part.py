"""What an architecture makes of one of a model's layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megamem.config.cost import Flops

if TYPE_CHECKING:
    from megamem.config.model import MixerConfig, ModelConfig
    from megamem.memory.base import StateSpec


@dataclass(frozen=True)
class LayerPart:
    """One layer as its architecture has it: by default a decoder's, with the model's own shape and mixer."""

    model: ModelConfig
    """The model as the layer sees it: its widths, and the rows that it reads with each chunk as `chunk_size`."""
    mixer: MixerConfig
    """What mixes tokens in the layer."""
    role: str = ""
    """A name that layers which are built alike have in common, besides equal mixers."""
    restarts: bool = False
    """Whether the layer reads every chunk as a document of its own."""
    keeps_state: bool = True
    """Whether a state of its mixer passes from call to call; if not, the layer reads whole chunks only."""
    beside: Mapping[str, StateSpec] = field(default_factory=dict)
    """Components that the stage with this layer keeps besides its mixer's state."""
    extra_parameters: int = 0
    """Parameters of the architecture that lie with the layer."""
    extra_flops: Mapping[str, Flops] = field(default_factory=dict)
    """FLOPs per token of what these parameters do, by name."""
