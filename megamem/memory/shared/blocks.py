"""How the tokens of a call fall into a mechanism's blocks.

Each batch row counts its own positions, so rows may stand at different offsets in their blocks (left-padded prompts).
A call is cut into block slices, stretches of tokens in which no row crosses a block border. Tokens of unfinished
blocks are kept in the state's open buffer, whose columns are aligned in time across rows: the last `offset` columns
belong to a row that stands at that offset in its block, older columns to rows that stand further on.

What is called a block here is whatever unit a mechanism divides its chunk into: a block of local attention, an inner
chunk of a deep memory, a segment of Memory Caching.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from megamem.config.model import ModelConfig
from megamem.memory.base import Chunk, to_device
from megamem.ops.dropout import DropoutKeys
from megamem.ops.rotary import RotaryScaling, RotaryTables, Rotation, consecutive_rotary_tables, rotary_tables
from megamem.ops.slices import parts
from megamem.ops.tables import kept_table


@dataclass(frozen=True)
class BlockSlice:
    """The tokens `begin` to `end` - 1 of a call, which in each batch row lie within one block."""

    begin: int
    end: int
    starts: tuple[int, ...]
    """Position in its document of each row's token `begin`; negative in left padding."""
    block: int
    """Tokens of a block."""
    dropout: DropoutKeys | None = field(default=None, kw_only=True, compare=False)
    """See `Chunk.dropout`."""

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.end - self.begin

    @property
    def offsets(self) -> tuple[int, ...]:
        """Offset of each row's first token in its block, which is the number of open tokens before it; 0 in padding."""
        return tuple(start % self.block if start > 0 else 0 for start in self.starts)

    @property
    def finished_tokens(self) -> tuple[int, ...]:
        """Tokens of each row's document that lie in finished blocks before this slice."""
        return tuple(max(start - offset, 0) for start, offset in zip(self.starts, self.offsets, strict=True))

    @property
    def ends(self) -> tuple[int, ...]:
        """Position in its document of the token that follows the slice, for each row."""
        return tuple(start + self.tokens for start in self.starts)

    @property
    def closing(self) -> tuple[bool, ...]:
        """Whether each row's block ends with this slice."""
        return tuple(end > 0 and end % self.block == 0 for end in self.ends)

    @property
    def open_tokens_after(self) -> int:
        """Number of columns that the open buffer must hold after this slice."""
        return max(end % self.block if end > 0 else 0 for end in self.ends)


def block_slices(chunk: Chunk, tokens: int, block: int) -> list[BlockSlice]:
    """Cut `tokens` tokens wherever some row's document begins or its position is a multiple of `block`."""
    slices = []
    for part in chunk.document_splits(tokens):
        here = chunk.after(part.start)
        first_borders = {part.start + -start % block for start in here.starts}
        inner = {cut for first in first_borders for cut in range(first, part.stop, block)}
        for begin, end in pairwise(sorted({part.start, part.stop, *inner})):
            own = chunk.after(begin)
            slices.append(BlockSlice(begin, end, own.starts, block, dropout=own.dropout))
    return slices


def split_tokens(slices: Sequence[BlockSlice], *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield for each block slice of a call its tokens of every tensor [tokens, ...].

    They are split at once: the gradient of a slice by itself is as long as the call.
    """
    sizes = [block_slice.tokens for block_slice in slices]
    return zip(*(parts(x, sizes) for x in tensors), strict=True)


def positions_in_block(block_slice: BlockSlice, open_tokens: int, device: torch.device) -> Tensor:
    """Return the position of each column, open tokens first, within its row's block.

    Returns: int64 [open_tokens + tokens, batch], or [..., 1] where all rows agree. Negative: the column is of an
        earlier block of this row.
    """
    columns = torch.arange(-open_tokens, block_slice.tokens, device=device)[:, None]
    offsets = block_slice.offsets
    if len(set(offsets)) == 1:
        return columns + offsets[0]
    return columns + to_device(offsets, device)


@lru_cache(maxsize=8)
def token_positions(chunk: Chunk, tokens: int, device: torch.device) -> Tensor:
    """Return `Chunk.positions` on a device, int64 [tokens, batch or 1]; cached, as all layers ask for the same."""
    with torch.inference_mode(False):
        return to_device(chunk.positions(tokens), device)


@lru_cache(maxsize=8)
def first_tokens(chunk: Chunk, tokens: int, count: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first `count` tokens of each document in a call: their places, rows and positions, [found] int64 each.

    Cached, as all layers ask for the same.
    """
    positions = np.broadcast_to(chunk.positions(tokens), (tokens, chunk.rows))
    at, rows = np.nonzero((positions >= 0) & (positions < count))
    with torch.inference_mode(False):
        return to_device(at, device), to_device(rows, device), to_device(positions[at, rows], device)


def rotation_of(model: ModelConfig) -> Rotation:
    """Return what the frequencies of a model's rotary positions are."""
    scaling = model.rope_scaling
    return Rotation(model.rope_theta, None if scaling is None else RotaryScaling(**scaling.model_dump()))


def row_rotary_tables(chunk: Chunk, tokens: int, width: int, rotation: Rotation, like: Tensor) -> RotaryTables:
    """Return the rotary tables of a call's tokens at their positions in their documents.

    Args:
        chunk: where the tokens lie.
        tokens: how many there are.
        width: width of a head.
        rotation: what their frequencies are.
        like: a tensor [tokens, ...] whose dtype and device the tables get.
    """
    if len(set(chunk.starts)) == 1 and not chunk.begins_inside:
        return consecutive_rotary_tables(chunk.starts[0], tokens, width, rotation, like.dtype, like.device)
    return _rotary_tables(chunk, tokens, width, rotation, like.dtype, like.device)


@kept_table(8)
def _rotary_tables(
    chunk: Chunk, tokens: int, width: int, rotation: Rotation, dtype: torch.dtype, device: torch.device
) -> RotaryTables:
    """See `row_rotary_tables`; cached, as all layers ask for the same."""
    return rotary_tables(token_positions(chunk, tokens, device), width, rotation, dtype)


def block_rotary_tables(
    block_slice: BlockSlice, open_tokens: int, width: int, rotation: Rotation, like: Tensor
) -> RotaryTables:
    """Return the rotary tables of `positions_in_block`, in the dtype and on the device of `like` [tokens, ...]."""
    chunk = Chunk(tuple(offset - open_tokens for offset in block_slice.offsets))
    return row_rotary_tables(chunk, open_tokens + block_slice.tokens, width, rotation, like)


def open_visible(block_slice: BlockSlice, open_tokens: int, device: torch.device) -> Tensor | None:
    """Return which columns of the open buffer belong to each row's block: [open_tokens, batch] bool; None if all do."""
    if all(offset == open_tokens for offset in block_slice.offsets):
        return None
    positions = positions_in_block(block_slice, open_tokens, device)[:open_tokens]
    return positions.expand(open_tokens, len(block_slice.starts)) >= 0
