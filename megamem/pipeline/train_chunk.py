"""One chunk of training on one stage: the step that both engines repeat."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from megamem.data.batch import Batch
from megamem.errors import ContractError
from megamem.memory.base import Chunk, Losses, States
from megamem.model.objective import Objective
from megamem.model.stage import Stage


def loss_names(stage: Stage, objective: Objective) -> tuple[str, ...]:
    """Return the names of all losses of a training step: those of the objective, then the layers' own."""
    return (*objective.names, *stage.auxiliary_losses)


def chunk_places(batch: Batch) -> list[Chunk]:
    """Return where the tokens of each chunk of a micro-batch lie in their documents."""
    if batch.begins is None:
        return [Chunk(tuple(starts.tolist())) for starts in batch.starts]
    # [chunks, tokens of a chunk, rows]; what begins with a chunk is in its `starts`
    inside = batch.begins.reshape(len(batch.starts), -1, batch.starts.shape[1])[:, 1:]
    return [
        Chunk(tuple(starts.tolist()), borders=tuple(tuple((np.flatnonzero(row) + 1).tolist()) for row in begins.T))
        for starts, begins in zip(batch.starts, inside, strict=True)
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
    stage: Stage, objective: Objective, x: Tensor, labels: Tensor, states: States, chunk: Chunk, check: bool
) -> ChunkResult:
    """Read a chunk with gradients, and on the last stage compute its losses.

    Args:
        x: token ids [tokens, batch] on the first stage, else hidden [tokens, batch, hidden_size].
        labels: [tokens, batch] int64.
        states: before the chunk, by component.
        chunk: where its tokens lie in their documents.
        check: whether to compare the new states with what their components declare.
    Raises: ContractError if they differ, or if a layer returns a loss that its configuration does not declare.
    """
    hidden, states, auxiliary = stage.read_documents(x, states, chunk)
    if check:
        stage.check_states(states, chunk.rows)
        if unknown := sorted(auxiliary.keys() - {*stage.auxiliary_losses}):
            raise ContractError(f"a mixer returns the loss {unknown[0]}, which its auxiliary_losses does not name")
    losses = objective.losses(stage, hidden, labels) if stage.last else {}
    return ChunkResult(hidden, states, losses, auxiliary)
