"""One chunk of training on one stage: the step that both engines repeat."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from megamem.config.model import ModelConfig
from megamem.data.batch import Batch
from megamem.errors import ContractError
from megamem.memory.base import Chunk, Losses, States
from megamem.model.objective import Objective
from megamem.model.stage import Stage
from megamem.ops.dropout import DropoutKeys
from megamem.pipeline.distillation import DISTILLATION


def loss_names(stage: Stage, objective: Objective, taught: bool = False) -> tuple[str, ...]:
    """Return the names of all losses of a training step: those of the objective's readings, then the layers' own.

    taught: whether a teacher's predictions are learned too.
    """
    further = (DISTILLATION,) if taught else ()
    return (*(name for own, _ in objective.readings for name in own.names), *further, *stage.auxiliary_losses)


class MicroBatch(NamedTuple):
    """A micro-batch of the data as one reading of the objective has it: what a step goes through forward and back."""

    batch: Batch
    """What is read, and predicted in this reading."""
    places: Sequence[Chunk]
    """Where its chunks lie in their documents."""
    reading: int = 0
    """Number of the reading among the objective's."""
    factor: Tensor | float = 1.0
    """Factor (scalar) of its losses in the sums of the step: their weight, and what makes a sum that is divided by the
    predicted tokens of the first reading a mean over those of its own."""


def dropout_keys(model: ModelConfig, seed: int, step: int, rows: Iterable[int]) -> DropoutKeys | None:
    """Return what dropout draws by in rows of the global batch; None if the model drops nothing.

    Args:
        model: its shares of dropout.
        seed: of the run.
        step: optimizer steps that the run has made before.
        rows: numbers of the rows in the global batch.
    """
    return DropoutKeys.of(seed, step, rows) if model.dropout or model.attention_dropout else None


def chunk_places(batch: Batch, dropout: DropoutKeys | None = None) -> list[Chunk]:
    """Return where the tokens of each chunk of a micro-batch lie in their documents.

    dropout: keys of its rows at the start of their sequences; None: nothing is dropped.
    """
    size = batch.tokens.shape[0] // len(batch.starts)
    keys = [dropout and dropout.after(size * index) for index in range(len(batch.starts))]
    if batch.begins is None:
        return [Chunk(tuple(starts.tolist()), dropout=own) for starts, own in zip(batch.starts, keys, strict=True)]
    # [chunks, tokens of a chunk, rows]; what begins with a chunk is in its `starts`
    inside = batch.begins.reshape(len(batch.starts), -1, batch.starts.shape[1])[:, 1:]
    return [
        Chunk(
            tuple(starts.tolist()),
            borders=tuple(tuple((np.flatnonzero(r) + 1).tolist()) for r in begins.T),
            dropout=own,
        )
        for starts, begins, own in zip(batch.starts, inside, keys, strict=True)
    ]


class ChunkResult(NamedTuple):
    """What a stage makes of a chunk."""

    hidden: Tensor
    """[tokens, batch, hidden_size] for the next stage; on the last one after the final norm."""
    states: States
    """The states after the chunk."""
    losses: Losses
    """The objective's losses by name, each summed over predicted tokens; none but on the last stage."""
    auxiliary: Losses
    """The layers' own terms by name, each a mean over the chunk's tokens and rows."""


def train_chunk(
    stage: Stage,
    objective: Objective,
    x: Tensor,
    labels: Tensor,
    states: States,
    place: Chunk | Sequence[Chunk],
    check: bool,
) -> ChunkResult:
    """Read a chunk with gradients, or the chunks of a window layer by layer; on the last stage compute its losses.

    Args:
        x: token ids [tokens, batch] on the first stage, else hidden [tokens, batch, hidden_size].
        labels: [tokens, batch] int64.
        states: before the chunk, by component.
        place: where its tokens lie in their documents. Of a window those of each chunk: then `x` and `labels` are as
            `Stage.in_window_order` has them, and what is returned is that of all chunks together.
        check: whether to compare the new states with what their components declare.
    Raises: ContractError if they differ, or if a layer returns a loss that its configuration does not declare.
    """
    if isinstance(place, Chunk):
        hidden, states, auxiliary = stage.read_documents(x, states, place)
    else:
        hidden, states, auxiliary = stage.read_window(x, states, place)
    if check:
        stage.check_states(states, labels.shape[1])
        if unknown := sorted(auxiliary.keys() - {*stage.auxiliary_losses}):
            raise ContractError(f"a mixer returns the loss {unknown[0]}, which its auxiliary_losses does not name")
    losses = objective.losses(stage, hidden, labels) if stage.last else {}
    return ChunkResult(hidden, states, losses, auxiliary)
