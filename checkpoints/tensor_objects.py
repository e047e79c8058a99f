"""Files of tensors in an object store: safetensors, written as a stream and read by the ranges that are needed.

Every extent of such a file has a hash in the manifest, and is checked as it is read: reading a part of a checkpoint
costs the bytes of that part, and none of them is used that is not as it was written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from checkpoints.folder import FileEntry
from checkpoints.location import REQUESTS, ObjectPath
from megamem.errors import CheckpointError, DamagedError

EXTENT_BYTES = 4 * 2**20
"""Bytes of an extent, but for a file's last: the least that is read, and what has a hash of its own."""
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Names of data types in the format."""
_TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


def safetensors_stream(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    """Yield a safetensors file piece by piece; the tensors' own memory is not copied.

    tensors: contiguous tensors on the CPU by key, [...] of any shape and a dtype of DTYPES.
    """
    # wide types first, so that every tensor begins at a multiple of its element's size, as the format asks
    order = sorted(tensors, key=lambda key: (-tensors[key].element_size(), key))
    header, end = {}, 0
    for key in order:
        start, end = end, end + tensors[key].nbytes
        header[key] = {
            "dtype": DTYPES[tensors[key].dtype],
            "shape": list(tensors[key].shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode("utf-8")
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for key in order:
        if tensors[key].numel():
            yield tensors[key].reshape(-1).view(torch.uint8).numpy().data


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


class TensorObject:
    """A safetensors file in a store; reads like what `safetensors.safe_open` returns."""

    def __init__(self, path: ObjectPath, entry: FileEntry) -> None:
        """Read the header.

        Args:
            path: the file.
            entry: what the manifest says of it. One that was written to a disk, and copied, has no hashes of extents.

        Raises:
            DamagedError: an extent is not as it was written; so does all that reads.
            CheckpointError: the store does not answer; so does all that reads.
        """
        self.path, self.entry = path, entry
        self.extent_bytes = entry.get("extent_bytes", EXTENT_BYTES)
        self._cache: dict[int, bytes] = {}
        length = int.from_bytes(self._read(0, 8), "little")
        header = json.loads(self._read(8, 8 + length))
        self._tensors = {
            key: _Stored(_TORCH_DTYPES[facts["dtype"]], facts["shape"], 8 + length + facts["data_offsets"][0])
            for key, facts in header.items()
        }

    def get_slice(self, key: str) -> TensorSlice:
        """Return a tensor of which nothing is read yet, to be indexed."""
        return TensorSlice(self, self._tensors[key])

    def get_tensor(self, key: str) -> Tensor:
        """Read a whole tensor."""
        return self.get_slice(key)[()]

    def _read(self, start: int, stop: int) -> bytearray:
        """Return the bytes from `start` to before `stop`, of extents that are as they were written."""
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
        for extent, data in zip(missing, found, strict=True):
            if hashes is not None and hashlib.sha256(data).hexdigest() != hashes[extent]:
                raise DamagedError(f"{self.path}: is damaged (the SHA-256 of extent {extent} is not the manifest's)")
            self._cache[extent] = data


@dataclass(frozen=True)
class TensorSlice:
    """A tensor of a file in a store, read by what it is indexed with."""

    file: TensorObject
    stored: _Stored

    def __getitem__(self, region: tuple[slice, ...]) -> Tensor:
        """Read a rectangle, one slice per axis; an empty tuple reads everything."""
        dtype, shape, start = self.stored
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
