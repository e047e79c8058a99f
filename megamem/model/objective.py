"""What an objective is: from a batch to what is read, what is to be predicted, and named losses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple, cast

from torch import Tensor

from megamem.config.model import ModelConfig
from megamem.config.objective import ObjectiveConfig
from megamem.memory.base import Losses
from megamem.model.stage import Stage


def build_objective(config: ObjectiveConfig, model: ModelConfig) -> Objective:
    """Build the objective that a configuration names, for `model`."""
    return cast(Objective, config.build(model))


class Reading(NamedTuple):
    """One of the ways in which a step reads each of its batches."""

    objective: Objective
    """Says what is read and predicted."""
    weight: float
    """Factor of its losses, means over its own predicted tokens, in the sum that is trained on."""


class Objective(ABC):
    """What a model is trained to predict. It has no parameters and keeps nothing between calls."""

    def __init__(self, model: ModelConfig) -> None:
        """Note the model that is trained."""
        self.model = model

    def inputs_and_labels(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return what is read and what is to be predicted, [tokens, batch] int64 each, of a micro-batch or a document.

        The numbers of rows and tokens stay as they are; a label of `LABEL_IGNORED` is not predicted.

        Args:
            tokens: [tokens, batch] int64, whole chunks as the data has them.
            labels: [tokens, batch] int64, the token that follows each, or what a task asks for there.
        """
        return tokens, labels

    def held_out_text(self, length: int) -> int | None:
        """Return of how many tokens of held-out text a sequence of `length` tokens is made; None: of whole documents.

        Evaluation cuts documents into so many tokens each where a number is returned. It reads what
        `inputs_and_labels` makes of a document, or of such tokens and padding up to `length`.
        """
        return None

    @property
    def readings(self) -> tuple[Reading, ...]:
        """How a step reads each batch, one pass for each; as many as its configuration's `readings` says.

        The first one is this objective by itself with weight 1: held-out text is read so, and its loss is the run's.
        """
        return (Reading(self, 1.0),)

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The names of its losses in one reading. The first one is reported as the run's loss."""

    @abstractmethod
    def losses(self, stage: Stage, hidden: Tensor, labels: Tensor) -> Losses:
        """Name the losses of one chunk, each a scalar summed over predicted tokens; their sum is trained on.

        Args:
            stage: the last stage of the model.
            hidden: [tokens, batch, hidden_size], as its `read_chunk` returns it.
            labels: [tokens, batch] int64 of this chunk.
        """
