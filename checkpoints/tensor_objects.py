"""Files of tensors in an object store: safetensors, read by the ranges that are needed.

Every extent of such a file has a hash in the manifest, and is checked as it is read: reading a part of a checkpoint
costs the bytes of that part, and none of them is used that is not as it was written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from checkpoints.location import REQUESTS, ObjectPath
from checkpoints.records import FileEntry
from megamem.errors import CheckpointError, DamagedError
from megamem.tensor_files import DTYPES

EXTENT_BYTES = 4 * 2**20
"""Bytes of an extent, but for a file's last: the least that is read, and what has a hash of its own."""
_TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
"""Data types by their names in the format."""


def regrouped(pieces: Iterable[memoryview], size: int) -> Iterator[memoryview]:
    """Yield the bytes of `pieces` in parts of `size` bytes; the last one may be shorter."""
    part = bytearray()
    for piece in pieces:
        at = 0
        while at < len(piece):
            taken = piece[at : at + size - len(part)]
            part += taken
            at += len(taken)
            if len(part) == size:
                yield memoryview(part)
                part = bytearray()
    if part:
        yield memoryview(part)


def extent_hashes(part: memoryview) -> list[str]:
    """Return the hash of each extent of a part that begins where an extent does."""
    return [hashlib.sha256(part[at : at + EXTENT_BYTES]).hexdigest() for at in range(0, len(part), EXTENT_BYTES)]


class _Stored(NamedTuple):
    """What the header of a file says of one tensor."""

    dtype: torch.dtype
    shape: list[int]
    start: int
    """Place of its first byte in the file."""


def _stored(facts: Mapping[str, Any], data_start: int) -> _Stored:
    """Return what a header says of one tensor. Raises ValueError, KeyError or TypeError where no header says it so.

    data_start: place of the first tensor's first byte in the file.
    """
    dtype, shape, (start, end) = _TORCH_DTYPES[facts["dtype"]], facts["shape"], facts["data_offsets"]
    if end - start != prod(shape) * dtype.itemsize or start < 0 or min(shape, default=0) < 0:
        raise ValueError
    return _Stored(dtype, shape, data_start + start)


class TensorObject:
    """A safetensors file in a store; reads like what `safetensors.safe_open` returns."""

    def __init__(self, path: ObjectPath, entry: FileEntry) -> None:
        """Read the header.

        Args:
            path: the file.
            entry: what the manifest says of it. One that was written to a disk, and copied, has no hashes of extents:
                `verify` hashes it whole, and of what changes after that only sizes and places are looked at.

        Raises:
            DamagedError: an extent is not as it was written, or no file of tensors can be; so does all that reads.
            CheckpointError: the store does not answer; so does all that reads.
        """
        self.path, self.entry = path, entry
        self.extent_bytes = entry.get("extent_bytes", EXTENT_BYTES)
        self._cache: dict[int, bytes] = {}
        length = int.from_bytes(self._read(0, 8), "little")
        text = self._read(8, 8 + length)
        try:
            self._tensors = {key: _stored(facts, 8 + length) for key, facts in json.loads(text).items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise self._damaged("its header does not say where tensors lie") from None

    def _damaged(self, why: str) -> DamagedError:
        return DamagedError(f"{self.path}: is damaged ({why})")

    def keys(self) -> Iterable[str]:
        """Return the keys of its tensors."""
        return self._tensors.keys()

    def get_slice(self, key: str) -> TensorSlice:
        """Return a tensor of which nothing is read yet, to be indexed."""
        if key not in self._tensors:
            raise self._damaged(f"{key} is missing")
        return TensorSlice(self, self._tensors[key])

    def get_tensor(self, key: str) -> Tensor:
        """Read a whole tensor."""
        return self.get_slice(key)[()]

    def _read(self, start: int, stop: int) -> bytearray:
        """Return the bytes from `start` to before `stop`, of extents that are as they were written."""
        if stop > self.entry["bytes"]:
            raise self._damaged("its header names bytes beyond its end")
        size, found = self.extent_bytes, bytearray(stop - start)
        extents = range(start // size, -(-stop // size))
        for first in range(0, len(extents), REQUESTS):
            batch = extents[first : first + REQUESTS]
            self._fetch(batch)
            for extent in batch:
                begin, end = max(start, extent * size), min(stop, (extent + 1) * size)
                found[begin - start : end - start] = self._cache[extent][begin - extent * size : end - extent * size]
        return found

    def _fetch(self, batch: range) -> None:
        """Read extents that are not at hand, and forget those of earlier batches."""
        size, total, hashes = self.extent_bytes, self.entry["bytes"], self.entry.get("extents")
        self._cache = {extent: data for extent, data in self._cache.items() if extent in batch}
        missing = [extent for extent in batch if extent not in self._cache]
        ranges = [(extent * size, min((extent + 1) * size, total)) for extent in missing]
        try:
            found = self.path.read_ranges(ranges) if ranges else []
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read ({error.strerror})") from None
        for extent, (begin, end), data in zip(missing, ranges, found, strict=True):
            if hashes is not None and hashlib.sha256(data).hexdigest() != hashes[extent]:
                raise self._damaged(f"the SHA-256 of extent {extent} is not the manifest's")
            if len(data) != end - begin:
                raise self._damaged(f"it has ended within extent {extent}")
            self._cache[extent] = data


@dataclass(frozen=True)
class TensorSlice:
    """A tensor of a file in a store, read by what it is indexed with."""

    file: TensorObject
    stored: _Stored

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor."""
        return self.stored.shape

    def get_dtype(self) -> str:
        """Return the name of its type in the format."""
        return DTYPES[self.stored.dtype]

    def __getitem__(self, region: tuple[slice, ...]) -> Tensor:
        """Read a rectangle, one slice per axis; an empty tuple reads everything."""
        dtype, shape, start = self.stored
        if region and (len(region) != len(shape) or any(s.stop > size for s, size in zip(region, shape, strict=True))):
            raise self.file._damaged(f"a tensor of it has shape {shape}, the checkpoint's index names more")
        if not prod(shape):
            return torch.empty(shape, dtype=dtype)[region]
        if not region:
            return torch.frombuffer(self.file._read(start, start + prod(shape) * dtype.itemsize), dtype=dtype).view(
                shape
            )
        # whole rows lie together, so that the rows of the rectangle are one range of bytes
        rows, rest = region[0], shape[1:]
        row_bytes = prod(rest) * dtype.itemsize
        data = self.file._read(start + rows.start * row_bytes, start + rows.stop * row_bytes)
        return torch.frombuffer(data, dtype=dtype).view(-1, *rest)[:, *region[1:]]
