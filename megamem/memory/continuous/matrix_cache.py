"""Fixed matrices on disk: built once per machine, read by every later process.

Files lie under $MEGAMEM_CACHE (~/.cache/megamem if unset; empty: nothing is kept on disk) as safetensors with a
checksum. A damaged file is built again. Processes that build the same matrices at once each write a file of their own
and rename it, so that a reader never sees half of one.
"""

from __future__ import annotations

import os
import warnings
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megamem.ops.tables import real_constants
from megamem.tensor_files import write_tensors

VERSION = "1"
"""Version of the matrices, to be raised when one of the same name changes, so that older files are not read."""


def cache_folder() -> Path | None:
    """Return the folder that matrices are kept in, or None if nothing is kept."""
    named = os.environ.get("MEGAMEM_CACHE")
    if named is None:
        return Path.home() / ".cache" / "megamem" / "matrices"
    return Path(named) / "matrices" if named else None


def cached(name: str, build: Callable[[], Sequence[Tensor]]) -> tuple[Tensor, ...]:
    """Return the CPU tensors [rows, ...] called `name`, from disk or else from `build`, which are then written."""
    folder = cache_folder()
    if folder is None:
        return _built(build)
    path = folder / f"{name}.safetensors"
    try:
        return _read(path)
    except FileNotFoundError:
        pass
    except (SafetensorError, OSError, ValueError) as error:
        warnings.warn(f"{path}: {error}; built again", stacklevel=2)
    matrices = _built(build)
    try:
        _write(path, matrices)
    except OSError as error:
        warnings.warn(f"{path}: not kept ({error}); name another folder in MEGAMEM_CACHE", stacklevel=2)
    return matrices


def _built(build: Callable[[], Sequence[Tensor]]) -> tuple[Tensor, ...]:
    """Return what `build` makes, [rows, ...] each, with numbers that may be kept."""
    with real_constants():
        return tuple(build())


def _checksum(matrices: Sequence[Tensor]) -> str:
    """Return the CRC-32 of all bytes of the matrices [rows, ...]."""
    value = 0
    for matrix in matrices:
        value = zlib.crc32(matrix.contiguous().view(torch.uint8).numpy().data, value)
    return f"{value:08x}"


def _read(path: Path) -> tuple[Tensor, ...]:
    with safe_open(path, framework="pt") as file:
        facts = file.metadata() or {}
        matrices = tuple(file.get_tensor(str(i)) for i in range(len(file.keys())))
    if facts.get("version") != VERSION or facts.get("crc32") != _checksum(matrices):
        raise ValueError("checksum or version differ")
    return matrices


def _write(path: Path, matrices: Sequence[Tensor]) -> None:
    """Write the matrices [rows, ...] to a file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {str(i): matrix for i, matrix in enumerate(matrices)}
    write_tensors(path, tensors, {"version": VERSION, "crc32": _checksum(matrices)})
