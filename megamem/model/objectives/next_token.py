"""Language modeling: predict the next token."""

from __future__ import annotations

from typing import Literal

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

    def build(self, model: ModelConfig) -> NextToken:
        """See `ObjectiveConfig.build`."""
        return NextToken(model)


class NextToken(Objective):
    """The cross-entropy of each next token, in nats."""

    @property
    def names(self) -> tuple[str, ...]:
        """See `Objective.names`."""
        return ("next_token",)

    def losses(self, stage: Stage, hidden: Tensor, labels: Tensor) -> Losses:
        """See `Objective.losses`; hidden: [tokens, batch, hidden_size], labels: [tokens, batch]."""
        return {"next_token": stage.token_losses(hidden, labels).sum()}
