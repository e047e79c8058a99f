"""Copying: the first half of each sequence comes again, and its tokens are to be predicted there."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from megamem.config.data import DataConfig
from megamem.config.model import ModelConfig
from megamem.config.objective import OBJECTIVES, ObjectiveConfig
from megamem.memory.base import LABEL_IGNORED, Losses
from megamem.model.objective import Objective
from megamem.model.stage import Stage


@OBJECTIVES.register
class CopyConfig(ObjectiveConfig):
    """The cross-entropy of the second half of each sequence, which is its first half again (docs/objectives.md)."""

    kind: Literal["copy"] = "copy"
    """`copy`"""

    def check_sequences(self, model: ModelConfig, data: DataConfig) -> None:
        """See `ObjectiveConfig.check_sequences`."""
        check_copied(self.kind, model, data)

    def build(self, model: ModelConfig) -> Copy:
        """See `ObjectiveConfig.build`."""
        return Copy(model)


@OBJECTIVES.register
class BlankCopyConfig(ObjectiveConfig):
    """The same labels, but all that is read of the second half is one token again and again: only what a model has
    kept of the first half tells what comes (docs/objectives.md)."""

    kind: Literal["blank_copy"] = "blank_copy"
    """`blank_copy`"""
    blank_token: Annotated[int, Field(ge=0)] = 1
    """Token of the vocabulary that is read in the place of the copy. It may occur in text too."""

    def check(self, model: ModelConfig) -> None:
        """See `ObjectiveConfig.check`."""
        if self.blank_token >= model.vocab_size:
            raise ValueError(
                f"training.objective.blank_token {self.blank_token} is beyond the vocabulary; use a token below "
                f"model.vocab_size {model.vocab_size}"
            )

    def check_sequences(self, model: ModelConfig, data: DataConfig) -> None:
        """See `ObjectiveConfig.check_sequences`."""
        check_copied(self.kind, model, data)

    def build(self, model: ModelConfig) -> Copy:
        """See `ObjectiveConfig.build`."""
        return Copy(model, self.blank_token)


def check_copied(kind: str, model: ModelConfig, data: DataConfig) -> None:
    """Raise ValueError unless each sequence has two halves in whole chunks, full of text, and one context.

    kind: of the objective that copies the first half.
    """
    if data.sequence_length % (2 * model.chunk_size):
        raise ValueError(
            f"data.sequence_length {data.sequence_length}: its half is no whole number of chunks, as "
            f"training.objective {kind} needs; use a multiple of {2 * model.chunk_size}, twice model.chunk_size"
        )
    if data.feeding != "sequences":
        raise ValueError(
            f"data.feeding {data.feeding} does not go with training.objective {kind}: a row would read on behind a "
            "copy, with half of its text left out; use sequences"
        )
    if data.reset != "none":
        raise ValueError(
            f"data.reset {data.reset} does not go with training.objective {kind}: where a document begins inside a "
            "sequence, what is copied would be forgotten; use none"
        )
    if data.documents not in ("join", "drop"):
        raise ValueError(
            f"data.documents {data.documents} does not go with training.objective {kind}: padding would be copied, and "
            "a document that begins inside a sequence would forget what is copied; use join or drop"
        )


class Copy(Objective):
    """The cross-entropy of the first half of a sequence where it comes again, in nats."""

    def __init__(self, model: ModelConfig, blank_token: int | None = None) -> None:
        """Note the model, and the token that is read in the place of the copy; the copy itself if None."""
        super().__init__(model)
        self.blank_token = blank_token

    @property
    def names(self) -> tuple[str, ...]:
        """See `Objective.names`."""
        return ("copy",) if self.blank_token is None else ("blank_copy",)

    def held_out_text(self, length: int) -> int:
        """See `Objective.held_out_text`: the first half; the other one is made of it."""
        return length // 2

    def inputs_and_labels(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """See `Objective.inputs_and_labels`; tokens, labels: [tokens, batch]."""
        half = tokens.shape[0] // 2
        assert tokens.shape[0] == 2 * half, "a sequence has two halves"
        first = tokens[:half]
        copied = torch.full_like(labels, LABEL_IGNORED)
        # the last token of the first half predicts the first one of the copy; nothing follows the last one of all
        copied[half - 1 : -1] = first
        again = first if self.blank_token is None else torch.full_like(first, self.blank_token)
        return torch.cat((first, again)), copied

    def losses(self, stage: Stage, hidden: Tensor, labels: Tensor) -> Losses:
        """See `Objective.losses`; hidden: [tokens, batch, hidden_size], labels: [tokens, batch]."""
        return {self.names[0]: stage.token_losses(hidden, labels).sum()}
