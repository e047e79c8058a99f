"""Next tokens and copies together: each batch is read as text, and once more as copies of its sequences."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny

from megamem.config.data import DataConfig
from megamem.config.model import ModelConfig
from megamem.config.objective import OBJECTIVES, ObjectiveConfig
from megamem.model.objective import Reading
from megamem.model.objectives.copy import Copy, CopyingConfig
from megamem.model.objectives.next_token import NextToken, NextTokenConfig


def parse_copying(value: object) -> object:
    """Turn a kind, or a mapping with one, into the configuration of a copy. Raises ValueError for another objective."""
    found = OBJECTIVES.parse(value)
    if isinstance(found, ObjectiveConfig) and not isinstance(found, CopyingConfig):
        raise ValueError(f"{found.kind} does not copy; use copy or blank_copy")
    return found


@OBJECTIVES.register
class CombinedConfig(ObjectiveConfig):
    """The cross-entropy of each next token, and that of a copy, from two readings of each batch
    (docs/objectives.md)."""

    kind: Literal["combined"] = "combined"
    """`combined`"""
    next_token: NextTokenConfig = NextTokenConfig()
    """The fields of `next_token`."""
    copies: Annotated[SerializeAsAny[CopyingConfig], BeforeValidator(parse_copying)] = Field(
        default="copy", validate_default=True
    )
    """How the second reading copies: `copy` or `blank_copy`, with its fields."""
    copy_weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Factor of the mean loss of copied tokens beside the mean loss of next tokens. The paper's is 1, and 0.5 in its
    authors' code, which divides the loss of copies by all chunks, those without labels included."""

    @property
    def readings(self) -> int:
        """See `ObjectiveConfig.readings`."""
        return 2

    def check(self, model: ModelConfig) -> None:
        """See `ObjectiveConfig.check`."""
        self.next_token.check(model)
        self.copies.check(model)

    def check_sequences(self, model: ModelConfig, data: DataConfig) -> None:
        """See `ObjectiveConfig.check_sequences`."""
        self.copies.check_sequences(model, data)

    def build(self, model: ModelConfig) -> Combined:
        """See `ObjectiveConfig.build`."""
        return Combined(model, self.next_token.z_loss, self.copies.build(model), self.copy_weight)


class Combined(NextToken):
    """The cross-entropy of each next token, in nats; a second reading of each batch trains copying."""

    def __init__(self, model: ModelConfig, z_loss: float, copy: Copy, copy_weight: float) -> None:
        """Describe both readings.

        Args:
            model: the model that is trained.
            z_loss: see `NextToken`.
            copy: the objective of the second reading.
            copy_weight: factor of its mean loss beside that of next tokens.
        """
        super().__init__(model, z_loss)
        self.copy, self.copy_weight = copy, copy_weight

    @property
    def readings(self) -> tuple[Reading, ...]:
        """See `Objective.readings`."""
        return (Reading(self, 1.0), Reading(self.copy, self.copy_weight))
