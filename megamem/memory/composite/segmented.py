"""What mixers share that cut a text into segments and keep the memories of those that have ended."""

from __future__ import annotations

from typing import ClassVar, cast

from pydantic import PositiveInt

from megamem.config.model import MIXERS, AnyMixer, MixerConfig, ModelConfig
from megamem.memory.recurrent.base import RecurrentConfig


class SegmentedConfig(MixerConfig):
    """Fields of mixers that cut a text into segments and keep the memories of those that have ended."""

    unfit: ClassVar[str] = "is no memory that can be kept"
    """What the error says of memories that do not fit."""
    memory: AnyMixer
    """The recurrent memory."""
    segment: PositiveInt
    """Tokens of a segment."""

    @classmethod
    def fits(cls, memory: type[MixerConfig]) -> bool:
        """Return whether a kind of memory can be kept."""
        return issubclass(memory, RecurrentConfig)

    @property
    def recurrent(self) -> RecurrentConfig:
        """The memory's configuration. Raises ValueError for a mixer that does not fit."""
        if not self.fits(type(self.memory)):
            valid = ", ".join(kind for kind, config in MIXERS.kinds().items() if self.fits(config))
            raise ValueError(f"memory {self.memory.kind} {self.unfit}; valid: {valid}")
        return cast(RecurrentConfig, self.memory)

    def projection_biases(self, model: ModelConfig) -> int:
        """See `MixerConfig.projection_biases`."""
        return self.recurrent.projection_biases(model)

    def rotates(self) -> bool:
        """See `MixerConfig.rotates`."""
        return self.recurrent.rotates()

    def check(self, model: ModelConfig) -> None:
        """See `MixerConfig.check`."""
        self.recurrent.check(model)
        if model.chunk_size % self.segment:
            raise ValueError(f"segment {self.segment} does not divide model.chunk_size {model.chunk_size}")
        if self.segment % self.recurrent.block():
            raise ValueError(f"segment {self.segment} is no multiple of memory.inner_chunk {self.recurrent.block()}")
