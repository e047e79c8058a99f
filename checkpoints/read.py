"""The reading of checkpoints in one process, tensor by tensor: to compare, to merge, to list."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from checkpoints.folder import Checkpoint
from checkpoints.fragments import region
from checkpoints.records import TensorEntry
from checkpoints.storage import TensorFiles, read_index
from checkpoints.weights import WeightsHeader, write_weights
from megamem.config.load import parse_config
from megamem.config.model import ModelConfig
from megamem.errors import CheckpointError

MASTER = "master/"
"""What the names of the FP32 weights begin with."""


def read_tensor(checkpoint: Checkpoint, name: str) -> Tensor:
    """Return one global tensor, put together from its pieces. Raises CheckpointError for a missing or damaged file."""
    entry = read_index(checkpoint.path).get(name)
    if entry is None:
        raise CheckpointError(f"{checkpoint.path}: holds no tensor {name}")
    return _assembled(TensorFiles(checkpoint.path), name, entry)


def _assembled(files: TensorFiles, name: str, entry: TensorEntry) -> Tensor:
    """See `read_tensor`; where the tensor's index entry is known, the index need not be read again."""
    value = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
    for offsets, part in files.pieces(name, entry):
        value[region(offsets, part.shape)] = part
    return value


@dataclass(frozen=True)
class Difference:
    """A difference between two checkpoints in one tensor."""

    name: str
    """Global name of the tensor."""
    description: str
    """What differs, in words."""

    def __str__(self) -> str:
        """Return the difference in one line for people."""
        return f"{self.name}: {self.description}"


def compare(a: Checkpoint, b: Checkpoint) -> tuple[int, Iterator[Difference]]:
    """Return the number of tensors of both, and every difference in value, shape or dtype, bit by bit."""
    ours, theirs = read_index(a.path), read_index(b.path)
    return len({*ours, *theirs}), _differences(a, b, ours, theirs)


def _differences(
    a: Checkpoint, b: Checkpoint, ours: dict[str, TensorEntry], theirs: dict[str, TensorEntry]
) -> Iterator[Difference]:
    """Yield the differences between checkpoints whose indices are `ours` and `theirs`."""
    a_files, b_files = TensorFiles(a.path), TensorFiles(b.path)
    for name in sorted({*ours, *theirs}):
        if name not in ours or name not in theirs:
            yield Difference(name, f"only in {a.path if name in ours else b.path}")
            continue
        x, y = _assembled(a_files, name, ours[name]), _assembled(b_files, name, theirs[name])
        if x.shape != y.shape or x.dtype != y.dtype:
            yield Difference(name, f"{x.dtype} {list(x.shape)} and {y.dtype} {list(y.shape)}")
        elif not torch.equal(x.flatten().view(torch.uint8), y.flatten().view(torch.uint8)):
            wrong = (x != y).sum().item()
            largest = (x.double() - y.double()).abs().max().item()
            yield Difference(name, f"{wrong:,} of {x.numel():,} values differ, by {largest:.3g} at most")


def read_weights(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """Yield the FP32 weights by global name, put together one after the other. Raises CheckpointError."""
    files = TensorFiles(checkpoint.path)
    for name, entry in read_index(checkpoint.path).items():
        if name.startswith(MASTER):
            # frozen weights are stored in the dtype that training computes with
            yield name.removeprefix(MASTER), _assembled(files, name, entry).float()


def merge_weights(checkpoint: Checkpoint, path: Path) -> int:
    """Write the FP32 weights as one safetensors file of whole tensors by global name; return their number.

    Raises:
        CheckpointError: `path` exists or cannot be written, or the checkpoint cannot be read.
    """
    if path.exists():
        raise CheckpointError(f"{path}: exists already; choose another file")
    merged = dict(read_weights(checkpoint))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_weights(merged, path, _header(checkpoint))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written ({error.strerror})") from None
    return len(merged)


def _header(checkpoint: Checkpoint) -> WeightsHeader:
    """Return what the weights of a checkpoint are of, as its run says."""
    run = checkpoint.run()
    model = parse_config(ModelConfig, run["model"], f"{checkpoint.path / 'run.json'}: model")
    return WeightsHeader.of_model(model, run.get("vocabulary_sha256"))
