"""Kept segments of constant length: a list with one entry per finished chunk, and the columns of the open chunk.

Rows of a batch may end their segments at different times (left-padded prompts). Whenever some row's segment ends, every
row gets a column, and `filled` says whether the row's own segment ended there.

Letters of shapes: B batch rows, H local key/value heads, N kept segments, D head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megamem.config.model import ModelConfig
from megamem.memory.base import State, to_device
from megamem.memory.composite.memory_caching_settings import MemoryCachingSettings
from megamem.memory.composite.segments import Ended, KeptSegments, Segments, SegmentSlice, pool


class ConstantSegments(KeptSegments):
    """Keeps the segments of a text one by one, and says which of them a token may read."""

    def __init__(self, config: MemoryCachingSettings, model: ModelConfig) -> None:
        self.config = config
        self.chunk_size = model.chunk_size
        self.per_chunk = model.chunk_size // config.segment
        self.names = [*config.recurrent.snapshot_shapes(model), "pool", "filled"]

    def room(self, state: State, segments: int) -> int:
        """See `KeptSegments.room`: those that end the open chunk at the latest."""
        return min(segments, self.per_chunk - state["closed_filled"].shape[1])

    def readable(self, state: State, block_slice: SegmentSlice) -> list[Segments]:
        """See `KeptSegments.readable`."""
        return self._readable(self._entries(state), [block_slice])

    def one_by_one(
        self, state: State, ended: Ended, slices: Sequence[SegmentSlice], parameters: Mapping[str, Tensor]
    ) -> tuple[list[list[Segments]], State]:
        """See `KeptSegments.one_by_one` (N segments, [B, H, N, ...]): all ask together."""
        new, count = self._columns(ended), len(slices)
        filled = state["closed_filled"].new_ones(ended.key_sum.shape[0], count)
        own = {**dict(zip(self.names, new, strict=False)), "filled": filled}
        # a segment is read from the next one on
        size = self.config.segment
        spans = [(size * (n + 1), size * count) for n in range(count)]
        *older, newest = self._readable([own, *self._entries(state)], slices, own=count)
        return [[*older, newest._replace(spans=spans)]], self._append(state, [*new, filled], slices[-1])

    def close(self, state: State, ended: Ended, block_slice: SegmentSlice, parameters: Mapping[str, Tensor]) -> State:
        """See `KeptSegments.close` (a segment, [B, H, ...])."""
        closing = to_device(block_slice.closing, ended.key_sum.device, torch.bool)
        new = self._columns(Ended(tuple(x[:, :, None] for x in ended.matrices), ended.key_sum[:, :, None], None))
        if not all(block_slice.closing):  # nothing is kept of other rows
            new = [torch.where(closing.view(-1, *[1] * (x.ndim - 1)), x, 0) for x in new]
        return self._append(state, [*new, closing.to(state["closed_filled"].dtype)[:, None]], block_slice)

    def _columns(self, ended: Ended) -> list[Tensor]:
        """Return what is kept of N segments: matrices [B, H, N, ...] and pools [B, H, N, D]."""
        rows, _, count, _ = ended.key_sum.shape
        return [*ended.matrices, pool(ended.key_sum, [[self.config.segment] * count] * rows, self.config.pooling)]

    def _entries(self, state: State) -> list[dict[str, Tensor]]:
        """Return all that is kept, the open chunk's columns first, then those of past chunks, the newest first."""
        return [{name: state[f"closed_{name}"] for name in self.names}, *reversed(state["kept"])]

    def _readable(
        self, entries: list[dict[str, Tensor]], slices: Sequence[SegmentSlice], own: int = 0
    ) -> list[Segments]:
        """See `readable`.

        entries: tensors [B, H, N, ...] of kept segments, the newest entry first, within it the newest column last;
        slices: S segments that ask together; own: how many of them are the columns of the first entry.
        """
        reach = [[self.config.reach(start, self.chunk_size) for start in here.starts] for here in slices]
        # enough columns for the row with the longest reach, even if rows never end their segments together
        columns = max(max(rows) * here.columns - i for i, (rows, here) in enumerate(zip(reach, slices, strict=True)))
        parts: list[Segments] = []
        # how many of each row's own segments are newer than the entry [B, S, 1]
        newer = entries[0]["filled"].new_zeros(len(reach[0]), len(reach), 1)
        limit = to_device(reach, newer.device, newer.dtype).mT[..., None]
        for entry in entries:
            filled = entry["filled"][:, None]
            if not filled.shape[-1]:
                continue
            if entry is entries[0] and own:
                # those that end before each segment that asks
                filled = filled * filled.new_ones(len(slices), own).tril(-1)
            elif columns <= 0:
                break
            else:
                columns -= filled.shape[-1]
            # how many of the row's own segments there are from each column to the newest, [B, S, N]
            from_here = filled.flip(-1).cumsum(-1).flip(-1) + newer
            visible = (filled > 0) & (from_here <= limit)
            newer = from_here[..., :1]
            weights = tuple(entry[name] for name in self.names[:-2])
            far = self.config.kept_on == "host" and filled.shape[-1] == self.per_chunk and entry is not entries[0]
            parts.append(Segments(weights, entry["pool"], visible, from_here, far))
        return parts[::-1]

    def _append(self, state: State, new: list[Tensor], block_slice: SegmentSlice) -> State:
        """Append columns of finished segments, and the chunk's columns to the list once there are all of them.

        new: memories and pools [B, H, N, ...] of segments that end with the slice; last whether each row has such a
            segment, [B, N] int64.
        """
        columns = {
            name: _appended(state[f"closed_{name}"], column, _axis(name))
            for name, column in zip(self.names, new, strict=True)
        }
        kept = list(state["kept"])
        if columns["filled"].shape[1] == self.per_chunk:
            kept.append(self._stored(columns))
            columns = {name: _without_columns(tensor, _axis(name)) for name, tensor in columns.items()}
        return {
            **state,
            **{f"closed_{name}": tensor for name, tensor in columns.items()},
            "kept": self._bounded(kept, block_slice),
        }

    def _stored(self, columns: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a chunk's columns [B, H, N, ...] as they are kept: with `kept_on: host` matrices in host memory.

        What the router needs stays on the device, and so does everything while gradients are taken.
        """
        if self.config.kept_on == "device" or torch.is_grad_enabled():
            return columns
        return {name: x if name in ("pool", "filled") else in_host_memory(x) for name, x in columns.items()}

    def _bounded(self, kept: list[dict[str, Tensor]], block_slice: SegmentSlice) -> list[dict[str, Tensor]]:
        """Return the entries [B, H, N, ...] within some row's reach; rows on a grid of their own fill own columns."""
        reach = max(self.config.reach(end, self.chunk_size) for end in block_slice.ends) * block_slice.columns
        needed = -(-reach // self.per_chunk)
        return kept[max(len(kept) - needed, 0) :]


def in_host_memory(x: Tensor) -> Tensor:
    """Return a tensor [...] of a CUDA device in pinned host memory; one of the host as it is."""
    if not x.is_cuda:
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x)


def _appended(columns: Tensor, new: Tensor, axis: int) -> Tensor:
    """Return columns [..., N, ...] and new ones behind them, in the order of memory, which readers want."""
    return torch.cat((columns, new), dim=axis) if columns.shape[axis] else whole(new)


def whole(x: Tensor) -> Tensor:
    """Return x [...] itself, or a copy where it is only a part of a larger tensor, which it would keep alive."""
    apart = x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes
    return x if apart else x.clone(memory_format=torch.contiguous_format)


def _without_columns(columns: Tensor, axis: int) -> Tensor:
    """Return a tensor like `columns` [..., N, ...] without any. A part of them would have a gradient of their size."""
    return columns.new_empty([0 if at == axis else size for at, size in enumerate(columns.shape)])


def _axis(name: str) -> int:
    """Return the axis of the segments in a tensor that is kept."""
    return 1 if name == "filled" else 2
