"""The pieces of a global tensor that a rank holds, in the form torch's distributed checkpoint (DCP) reads and writes.

Tensor parallelism gives a rank a slice along one axis; ZeRO then gives it a run of that slice's elements in flat order,
which is a few rectangles. Every piece is a view of the rank's own memory: saving reads it, loading writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

Sizes = tuple[int, ...]
"""One number per axis of a tensor."""


def region(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of a rectangle in the tensor it is a part of."""
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


def rectangles(shape: Sequence[int], start: int, stop: int) -> list[tuple[Sizes, Sizes]]:
    """Return offsets and sizes of the rectangles that a run of a tensor's elements makes up, in the elements' order.

    Args:
        shape: of the tensor, whose elements lie in row-major order.
        start: first element.
        stop: element after the last one.
    """
    if start >= stop:
        return []
    if not shape:
        return [((), ())]
    rest = tuple(shape[1:])
    inner = prod(rest)
    first, last = start // inner, (stop - 1) // inner
    # all within one row
    if first == last and (start % inner or stop % inner):
        return _in_row(first, rectangles(rest, start - first * inner, stop - first * inner))
    found: list[tuple[Sizes, Sizes]] = []
    # the end of the first row, whole rows, the beginning of the last row
    if start % inner:
        found += _in_row(first, rectangles(rest, start - first * inner, inner))
        first += 1
    whole = stop // inner - first
    if whole:
        found.append(((first, *(0,) * len(rest)), (whole, *rest)))
    if stop % inner:
        found += _in_row(last, rectangles(rest, 0, stop - last * inner))
    return found


def _in_row(row: int, parts: list[tuple[Sizes, Sizes]]) -> list[tuple[Sizes, Sizes]]:
    """Return rectangles of one row as rectangles of the tensor."""
    return [((row, *offsets), (1, *sizes)) for offsets, sizes in parts]


@dataclass(frozen=True)
class Piece:
    """A rectangle of a global tensor in this rank's memory."""

    offsets: Sizes
    """Its first element in the global tensor, axis by axis."""
    tensor: Tensor
    """Its values, a view of the memory that training uses."""


class Fragments:
    """This rank's pieces of one global tensor; torch.distributed.checkpoint calls the methods in underscores."""

    def __init__(self, shape: Sequence[int], pieces: Sequence[Piece], writes: bool = True) -> None:
        """Describe a global tensor.

        Args:
            shape: of the global tensor.
            pieces: what this rank holds of it.
            writes: False where another rank holds and writes the same.
        """
        self.shape = torch.Size(shape)
        self.pieces = list(pieces)
        self.writes = writes

    @staticmethod
    def of_flat(
        flat: Tensor, start: int, local_shape: Sequence[int], axis: int | None, tp_size: int, tp_rank: int
    ) -> Fragments:
        """Make the pieces that a run of elements of a parameter's shard makes up.

        Args:
            flat: [N] the elements, of any dtype.
            start: place of the first one in the shard, whose elements lie in row-major order.
            local_shape: shape of this tensor-parallel rank's shard.
            axis: axis along which tensor-parallel ranks split the global tensor; None if all hold it whole, and the
                first of them writes it.
            tp_size: number of tensor-parallel ranks.
            tp_rank: this rank among them.
        """
        shape, corner = list(local_shape), [0] * len(local_shape)
        if axis is not None:
            corner[axis] = shape[axis] * tp_rank
            shape[axis] *= tp_size
        pieces, at = [], 0
        for offsets, sizes in rectangles(local_shape, start, start + flat.numel()):
            count = prod(sizes)
            place = tuple(a + b for a, b in zip(offsets, corner, strict=True))
            pieces.append(Piece(place, flat[at : at + count].view(sizes)))
            at += count
        return Fragments(shape, pieces, writes=axis is not None or tp_rank == 0)

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        """Return one item per piece."""
        if not self.writes:
            return []
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(piece.offsets), index),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(piece), properties=TensorProperties.create_from_tensor(piece.tensor), size=self.shape
                ),
            )
            for index, piece in enumerate(self.pieces)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return what a load should fill."""
        return [_chunk(piece) for piece in self.pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the values of the piece that an item names."""
        return next(piece.tensor for piece in self.pieces if piece.offsets == tuple(index.offset or ()))


class SavePlanner(DefaultSavePlanner):
    """DCP's planner for a flat dict of `Fragments`."""

    def __init__(self) -> None:
        """Leave the dict as it is: its keys are global names."""
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Return the values of the piece that an item names."""
        fragments: Fragments = self.state_dict[index.fqn]
        return fragments.__get_tensor_shard__(index)


class LoadPlanner(DefaultLoadPlanner):
    """DCP's planner for a flat dict of `Fragments`, which are filled in place."""

    def set_up_planner(
        self, state_dict: dict[str, Fragments], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the fragments as they are."""
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the memory of the piece that an item names."""
        fragments: Fragments = self.state_dict[index.fqn]
        return fragments.__get_tensor_shard__(index)


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(piece.offsets), sizes=piece.tensor.shape)
