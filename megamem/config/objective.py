"""What a model is trained to predict, as a configuration: `ObjectiveConfig`, which every objective extends."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, SerializeAsAny

from megamem.config.base import ConfigModel
from megamem.config.data import DataConfig
from megamem.config.model import ModelConfig
from megamem.config.registry import Registry


class ObjectiveConfig(ConfigModel):
    """What a model is trained to predict. Subclasses add their own fields."""

    causal: ClassVar[bool] = True
    """Whether a token is predicted from those before it; if not, an architecture must not be causal either."""

    kind: str
    """Name of the objective."""

    def check(self, model: ModelConfig) -> None:
        """Raise ValueError if this objective does not fit `model`, naming field, value and what would be valid."""

    def check_sequences(self, model: ModelConfig, data: DataConfig) -> None:
        """Raise ValueError if it cannot be trained on the sequences that `data` makes, as `check` does."""

    @property
    def readings(self) -> int:
        """How often a step reads each batch, always as another `Reading` of the objective that it builds."""
        return 1

    @abstractmethod
    def build(self, model: ModelConfig) -> object:
        """Build the `megamem.model.objective.Objective` for `model`."""


OBJECTIVES: Registry[ObjectiveConfig] = Registry("objective", "megamem.model.objectives", "megamem.objectives")
"""Every objective there is. A new one registers its configuration with `@OBJECTIVES.register`."""

AnyObjective = Annotated[SerializeAsAny[ObjectiveConfig], BeforeValidator(OBJECTIVES.parse)]
