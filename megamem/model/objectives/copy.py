"""Copying: the first half of each sequence comes again, and its tokens are to be predicted there."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor

from megamem.config.base import ConfigModel
from megamem.config.data import DataConfig
from megamem.config.model import ModelConfig
from megamem.config.objective import OBJECTIVES, ObjectiveConfig
from megamem.memory.base import LABEL_IGNORED, Losses
from megamem.model.objective import Objective
from megamem.model.stage import Stage


class DelimiterConfig(ConfigModel):
    """Tokens that say that a copy follows (docs/objectives.md)."""

    token: NonNegativeInt
    """A token of the vocabulary. No text has one beyond the tokenizer's vocabulary (`model.vocab_size` must be larger
    then), or a special one; nothing tells another one from text."""
    count: PositiveInt = 3
    """How many times it is read, fewer than a chunk has tokens."""
    placement: Literal["insert", "overwrite"] = "insert"
    """`insert`: in front of the copy, which ends so many tokens earlier. `overwrite`: in the place of the first tokens
    of the copy, which are not predicted."""


class CopyingConfig(ObjectiveConfig):
    """What all objectives that copy the first half of a sequence have in common."""

    delimiter: DelimiterConfig | None = None
    """What says that a copy follows; nothing does if not given."""

    def check(self, model: ModelConfig) -> None:
        """See `ObjectiveConfig.check`."""
        if self.delimiter is None:
            return
        check_token(f"{self.kind}'s delimiter.token", self.delimiter.token, model)
        if self.delimiter.count >= model.chunk_size:
            raise ValueError(
                f"training.objective: {self.kind}'s delimiter.count {self.delimiter.count} fills a whole chunk; use "
                f"fewer than model.chunk_size {model.chunk_size}"
            )

    def check_sequences(self, model: ModelConfig, data: DataConfig) -> None:
        """See `ObjectiveConfig.check_sequences`."""
        check_copied(self.kind, model, data)

    @abstractmethod
    def build(self, model: ModelConfig) -> Copy:
        """See `ObjectiveConfig.build`."""


@OBJECTIVES.register
class CopyConfig(CopyingConfig):
    """The cross-entropy of the second half of each sequence, which is its first half again (docs/objectives.md)."""

    kind: Literal["copy"] = "copy"
    """`copy`"""

    def build(self, model: ModelConfig) -> Copy:
        """See `ObjectiveConfig.build`."""
        return Copy(model, delimiter=self.delimiter)


@OBJECTIVES.register
class BlankCopyConfig(CopyingConfig):
    """The same labels, but all that is read of the second half is one token again and again: only what a model has
    kept of the first half tells what comes (docs/objectives.md)."""

    kind: Literal["blank_copy"] = "blank_copy"
    """`blank_copy`"""
    blank_token: Annotated[int, Field(ge=0)] = 1
    """Token of the vocabulary that is read in the place of the copy. It may occur in text too."""

    def check(self, model: ModelConfig) -> None:
        """See `ObjectiveConfig.check`."""
        super().check(model)
        check_token("blank_copy's blank_token", self.blank_token, model)

    def build(self, model: ModelConfig) -> Copy:
        """See `ObjectiveConfig.build`."""
        return Copy(model, self.blank_token, self.delimiter)


def check_token(name: str, token: int, model: ModelConfig) -> None:
    """Raise ValueError if a token is beyond the vocabulary. name: of the objective's field that names it."""
    if token >= model.vocab_size:
        raise ValueError(
            f"training.objective: {name} {token} is beyond the vocabulary; use a token below model.vocab_size "
            f"{model.vocab_size}"
        )


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

    def __init__(
        self, model: ModelConfig, blank_token: int | None = None, delimiter: DelimiterConfig | None = None
    ) -> None:
        """Describe the copy.

        Args:
            model: the model that is trained.
            blank_token: what is read in the place of the copy; the copy itself if None.
            delimiter: what says that a copy follows; nothing does if None.
        """
        super().__init__(model)
        self.blank_token, self.delimiter = blank_token, delimiter

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
        text, count, again = tokens[:half], 0, tokens[:half]
        delimiters = text[:0]
        if self.delimiter is not None:
            count = self.delimiter.count
            delimiters = text.new_full((count, text.shape[1]), self.delimiter.token)
            again = text[: half - count] if self.delimiter.placement == "insert" else text[count:]
        copied = torch.full_like(labels, LABEL_IGNORED)
        # the last token before the copy predicts the first one of it; nothing follows the last one of all
        begin = half - 1 + count
        copied[begin : begin + len(again)] = again
        read = again if self.blank_token is None else torch.full_like(again, self.blank_token)
        return torch.cat((text, delimiters, read)), copied

    def losses(self, stage: Stage, hidden: Tensor, labels: Tensor) -> Losses:
        """See `Objective.losses`; hidden: [tokens, batch, hidden_size], labels: [tokens, batch]."""
        return {self.names[0]: stage.token_losses(hidden, labels).sum()}
