"""Rotary frequencies for texts longer than those that a model began with."""

from __future__ import annotations

from typing import Self

from pydantic import Field, PositiveInt, model_validator

from megamem.config.base import ConfigModel


class RopeScaling(ConfigModel):
    """Slower rotations for longer texts, as Llama 3.1 has them (`rope_type: llama3` in transformers).

    With the length L of the texts before, frequencies that turn less than `low_freq_factor` times in L tokens are
    divided by `factor`, those that turn more than `high_freq_factor` times stay as they are, and between the two the
    share of the divided one falls linearly with the turns.
    """

    factor: float = Field(gt=1)
    """What the lowest frequencies are divided by."""
    low_freq_factor: float = Field(default=1.0, gt=0)
    """Turns in L tokens, up to which a frequency is divided."""
    high_freq_factor: float = Field(default=4.0, gt=0)
    """Turns in L tokens, from which on it is not."""
    original_max_positions: PositiveInt = 8192
    """L, the length of the texts that the model was trained on before."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor {self.low_freq_factor} is not below high_freq_factor {self.high_freq_factor}"
            )
        return self
