"""What turns an encoded chunk into memories, and the slots in which a decoder finds those of earlier chunks.

Letters of shapes: S slots' rows (slots times memories a chunk), M memories a chunk, B batch rows, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megamem.config.model import ModelConfig
from megamem.memory.base import to_device
from megamem.model.norm import make_norm
from megamem.parallel.linears import Linears, constant, declare, normal


class MemoryProjection(nn.Module):
    """A linear map of memories, the same on every tensor-parallel rank: each holds all memories whole."""

    def __init__(self, inputs: int, outputs: int, std: float, bias: bool) -> None:
        super().__init__()
        self.weight = declare(nn.Parameter(torch.empty(outputs, inputs)), normal(std), fan_in=1)
        self.bias = declare(nn.Parameter(torch.empty(outputs)), constant(0.0)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[M, B, inputs] -> [M, B, outputs]."""
        return F.linear(x, self.weight, self.bias)


class MemoryWriter(nn.Module):
    """The last norm of an encoder, and the projections of memories behind it."""

    def __init__(self, model: ModelConfig, linears: Linears, count: int, widths: Sequence[int], back: int = 0) -> None:
        """Build it.

        Args:
            model: as the encoder's layers see it.
            linears: those of the encoder.
            count: memories of a chunk.
            widths: of what the projections take and make, the encoder's first.
            back: tokens between the one that is taken and the end of its part.
        """
        super().__init__()
        self.linears, self.count, self.back = linears, count, back
        self.norm = make_norm(model, linears) if model.norm_position != "post" else nn.Identity()
        self.projections = nn.ModuleList(
            MemoryProjection(inputs, outputs, model.init_std, model.all_biases) for inputs, outputs in pairwise(widths)
        )

    def embeddings(self, encoded: Tensor) -> Tensor:
        """Return what memories are made of [M, B, encoder's width], all of them on every rank.

        They are of the last token of each of M equal parts, or of the one `back` tokens before it.
        encoded: this rank's tokens of a chunk [chunk_size, B, encoder's width].
        """
        # normalized before tokens are joined: the norm's weight sums the gradients of ranks that share the tokens
        whole = self.linears.join_tokens(self.norm(encoded))
        part = whole.shape[0] // self.count
        return whole[part - 1 - self.back :: part]

    def memories(self, embeddings: Tensor) -> Tensor:
        """Return memories [M, B, D] of embeddings [M, B, encoder's width]."""
        for projection in self.projections:
            embeddings = projection(embeddings)
        return embeddings


def filled_slots(memories: Tensor, finished: Sequence[int], count: int, fill: float) -> Tensor:
    """Return the slots as a decoder reads them, with `fill` where there is no memory yet: [S, B, D].

    Args:
        memories: [S, B, D], those of the oldest chunk first.
        finished: how many slots each batch row has filled.
        count: memories of a chunk.
        fill: what the rows of an empty slot hold.
    """
    if len(set(finished)) == 1:
        full = memories[: finished[0] * count]
        return torch.cat((full, torch.full_like(memories[full.shape[0] :], fill)))
    known = _slot_of(memories, count) < to_device(finished, memories.device)
    return memories.where(known[..., None], fill)


def with_memories(memories: Tensor, written: Tensor, finished: Sequence[int]) -> Tensor:
    """Return the slots [S, B, D] with the memories of one more chunk: in its own slot or, if all are full, the last.

    Args:
        memories: [S, B, D], those of the oldest chunk first, which is dropped if all slots are full.
        written: memories of the chunk [M, B, D].
        finished: how many slots each batch row has filled before.
    """
    count = written.shape[0]
    slots = memories.shape[0] // count
    if len(set(finished)) == 1:
        kept = memories if finished[0] < slots else torch.cat((memories[count:], memories[:count]))
        begin = min(finished[0], slots - 1) * count
        return torch.cat((kept[:begin], written, kept[begin + count :]))
    behind = to_device(finished, memories.device)
    placed = written.repeat(slots, 1, 1).where((_slot_of(memories, count) == behind)[..., None], memories)
    return torch.cat((memories[count:], written)).where((behind == slots)[:, None], placed)


def _slot_of(memories: Tensor, count: int) -> Tensor:
    """Return the slot that each row of memories [S, B, D] is in, [S, 1] int64."""
    return torch.arange(memories.shape[0], device=memories.device)[:, None] // count
