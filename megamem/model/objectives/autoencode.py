"""Autoencoding: every token of a chunk is to be predicted at its own place."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from megamem.config.data import DataConfig
from megamem.config.model import ModelConfig
from megamem.config.objective import OBJECTIVES, ObjectiveConfig
from megamem.memory.base import Losses
from megamem.model.objective import Objective
from megamem.model.stage import Stage


@OBJECTIVES.register
class AutoencodeConfig(ObjectiveConfig):
    """The cross-entropy of each token that was read, at its own place; for autoencoders (docs/objectives.md)."""

    causal: ClassVar[bool] = False

    kind: Literal["autoencode"] = "autoencode"
    """`autoencode`"""

    def check_sequences(self, model: ModelConfig, data: DataConfig) -> None:
        """See `ObjectiveConfig.check_sequences`: chunks are full of text, and documents begin anywhere in them."""
        wrong = {
            f"data.documents {data.documents}": data.documents not in ("join", "drop"),
            f"data.feeding {data.feeding}": data.feeding != "sequences",
            f"data.reset {data.reset}": data.reset != "none",
        }
        if found := next((name for name, is_wrong in wrong.items() if is_wrong), None):
            raise ValueError(
                f"{found} does not go with training.objective {self.kind}, whose chunks are full of text; use "
                "documents join or drop, feeding sequences and reset none"
            )

    def build(self, model: ModelConfig) -> Autoencode:
        """See `ObjectiveConfig.build`."""
        return Autoencode(model)


class Autoencode(Objective):
    """The cross-entropy of the tokens that are read, in nats."""

    @property
    def names(self) -> tuple[str, ...]:
        """See `Objective.names`."""
        return ("autoencode",)

    def held_out_text(self, length: int) -> int:
        """See `Objective.held_out_text`: whole sequences, which padding does not fill up."""
        return length

    def inputs_and_labels(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """See `Objective.inputs_and_labels`; tokens, labels: [tokens, batch]."""
        return tokens, tokens

    def losses(self, stage: Stage, hidden: Tensor, labels: Tensor) -> Losses:
        """See `Objective.losses`; hidden: [tokens, batch, hidden_size], labels: [tokens, batch]."""
        return {"autoencode": stage.token_losses(hidden, labels).sum()}
