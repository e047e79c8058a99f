"""Files of tensors: safetensors, as a stream of bytes or whole on a disk, with the mode that the umask asks for."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megamem.files import sync

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Names of data types in the format."""


def safetensors_stream(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Iterator[memoryview]:
    """Yield a safetensors file piece by piece; the memory of contiguous tensors is not copied.

    Args:
        tensors: by key, on the CPU, [...] of any shape and a dtype of DTYPES.
        metadata: what the header says of the file.
    """
    # wide types first, so that every tensor begins at a multiple of its element's size, as the format asks
    order = sorted(tensors, key=lambda key: (-tensors[key].element_size(), key))
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
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
            yield tensors[key].detach().reshape(-1).view(torch.uint8).numpy().data


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file whole or not at all, forced to the disk before it gets its name.

    safetensors' own `save_file` gives every file the mode 0600, and its errors are no OSErrors.

    Args:
        path: the file; its folder must be there.
        tensors, metadata: as in `safetensors_stream`; [...] of any shape.

    Raises:
        OSError: with the file's name; of a full disk, with the bytes that are needed and those that are free.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            for piece in safetensors_stream(tensors, metadata):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            needed, free = sum(tensor.nbytes for tensor in tensors.values()), shutil.disk_usage(path.parent).free
            reason = f"{reason}: {needed:,} bytes needed, {free:,} bytes free"
        raise OSError(error.errno, reason, str(path)) from error
    sync(path.parent)
