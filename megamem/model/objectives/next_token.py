"""Language modeling: predict the next token."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from megamem.config.model import ModelConfig
from megamem.config.objective import OBJECTIVES, ObjectiveConfig
from megamem.memory.base import Losses
from megamem.model.objective import Objective
from megamem.model.stage import Stage


@OBJECTIVES.register
class NextTokenConfig(ObjectiveConfig):
    """The cross-entropy of each next token."""

    kind: Literal["next_token"] = "next_token"
    """`next_token`"""
    z_loss: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Coefficient of the squared logarithm of the softmax's normalizer, which keeps logits from drifting (Chowdhery et
    al. 2022, with 1e-4). It is a term of its own; the run's loss stays the cross-entropy."""

    def check(self, model: ModelConfig) -> None:
        """See `ObjectiveConfig.check`."""
        if self.z_loss and model.adaptive and model.adaptive.softmax:
            raise ValueError(
                f"training.objective.z_loss {self.z_loss:g} does not go with model.adaptive.softmax true, which has a "
                "normalizer for each cluster; use z_loss 0"
            )

    def build(self, model: ModelConfig) -> NextToken:
        """See `ObjectiveConfig.build`."""
        return NextToken(model, self.z_loss)


class NextToken(Objective):
    """The cross-entropy of each next token, in nats."""

    def __init__(self, model: ModelConfig, z_loss: float = 0.0) -> None:
        """Note the model, and the coefficient of the squared logarithm of the softmax's normalizer."""
        super().__init__(model)
        self.z_loss = z_loss

    @property
    def names(self) -> tuple[str, ...]:
        """See `Objective.names`."""
        return ("next_token", "z_loss") if self.z_loss else ("next_token",)

    def losses(self, stage: Stage, hidden: Tensor, labels: Tensor) -> Losses:
        """See `Objective.losses`; hidden: [tokens, batch, hidden_size], labels: [tokens, batch]."""
        if not self.z_loss:
            return {"next_token": stage.token_losses(hidden, labels).sum()}
        losses, normalizers = stage.token_losses_and_normalizers(hidden, labels)
        return {"next_token": losses.sum(), "z_loss": self.z_loss * normalizers.square().sum()}
