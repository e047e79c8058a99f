"""Reads tokens on, one call after the other, and gives their logits: the same calls as training, on any layout.

Letters: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from megamem.memory.base import LABEL_IGNORED, Chunk
from megamem.model.stage import Stage
from megamem.parallel.gather import gather_shards
from megamem.pipeline.reader import ChunkReader, RowGroup


@contextmanager
def generating(stage: Stage) -> Iterator[None]:
    """Enter evaluation mode, without gradients and with tokens whole on every rank: single ones cannot be split."""
    training, split = stage.training, stage.linears.sequence_parallel
    stage.eval()
    stage.linears.sequence_parallel = False
    try:
        with torch.no_grad():
            yield
    finally:
        stage.linears.sequence_parallel = split
        stage.train(training)


def side_by_side(sequences: Sequence[Sequence[int]], scored: Sequence[int], longest: int) -> tuple[Tensor, Tensor]:
    """Return tokens and labels [longest, B] of sequences of at most `longest` + 1 tokens, padded on the right.

    scored: of how many last tokens of each sequence the labels are known.
    """
    tokens = torch.zeros(longest, len(sequences), dtype=torch.int64)
    labels = torch.full_like(tokens, LABEL_IGNORED)
    for row, (sequence, count) in enumerate(zip(sequences, scored, strict=True)):
        assert 0 < count < len(sequence)
        ids = torch.tensor(sequence)
        tokens[: len(ids) - 1, row] = ids[:-1]
        labels[len(ids) - 1 - count : len(ids) - 1, row] = ids[-count:]
    return tokens, labels


class Decoder:
    """Runs calls through this rank's layers and keeps their states."""

    def __init__(self, reader: ChunkReader, rows: int) -> None:
        """Begin documents in so many rows."""
        self.reader, self.stage, self.topology, self.rows = reader, reader.stage, reader.topology, rows
        self.groups: list[RowGroup] | None = None

    def read(self, tokens: Tensor, chunk: Chunk, keep: int = 1) -> Tensor | None:
        """Read tokens [tokens, B]; logits [keep, B, V] of the last ones in float32 on the last stage, None if 0."""
        hidden = self.read_hidden(tokens, chunk, keep)
        if hidden is None or not keep:
            return None
        local = self.stage.logits(hidden).float()
        return gather_shards(local, 2, self.topology.tp_group) if self.topology else local

    def read_hidden(self, tokens: Tensor, chunk: Chunk, keep: int) -> Tensor | None:
        """Read tokens [tokens, B]; hidden states [keep, B, hidden_size] of the last ones on the last stage, else None.

        chunk: where they lie in their documents.
        """
        self.groups = self.groups or self.reader.begin(chunk)
        return self.reader.read(tokens, chunk, self.groups, keep)

    def agree(self, value: Tensor | None) -> Tensor:
        """Return the last stage's value on every stage, on the CPU; tokens [B] where other stages have None."""
        if self.topology is None or self.topology.pp_size == 1:
            assert value is not None
            return value
        value = torch.zeros(self.rows, dtype=torch.int64) if value is None else value
        on_device = value.to(self.reader.device)
        dist.broadcast(on_device, group=self.topology.pp_group, group_src=self.topology.pp_size - 1)
        return on_device.cpu()
