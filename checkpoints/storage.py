"""The files of a checkpoint, written and read by torch.distributed.checkpoint (DCP): safetensors and JSON, no code.

DCP's own file system storage pickles its metadata; here each rank writes one safetensors file whose keys are
`name@offset,offset`, and the coordinator an index in JSON from which the metadata is made again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from checkpoints import records
from checkpoints.folder import MANIFEST
from checkpoints.fragments import region
from checkpoints.location import Location, ObjectPath
from checkpoints.records import DataType, Manifest, TensorEntry
from checkpoints.target import Target
from checkpoints.tensor_objects import TensorObject
from megamem.errors import CheckpointError
from megamem.tensor_files import DTYPES

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import ReadItem

INDEX = "index.json"
"""Name of the file that tells where each tensor lies."""
T = TypeVar("T")


def data_file(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:05d}.safetensors"


def _key(index: MetadataIndex) -> str:
    """Return the key of a piece in its file: `NAME@OFFSET,OFFSET`."""
    return f"{index.fqn}@{','.join(map(str, index.offset or ()))}"


def _done(value: T) -> Future[T]:
    """Return a future that has its result already."""
    future: Future[T] = Future()
    future.set_result(value)
    return future


class SafeWriter(StorageWriter):
    """Writes this rank's items to one file; the coordinator writes the index."""

    def __init__(self, target: Target, rank: int) -> None:
        """Write to `target`, which is prepared already. rank: names the file."""
        self.target, self.rank = target, rank

    def reset(self, checkpoint_id: Any = None) -> None:
        """See `StorageWriter.reset`."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """See `StorageWriter.set_up_storage_writer`."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """See `StorageWriter.prepare_local_plan`."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """See `StorageWriter.prepare_global_plan`."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """See `StorageWriter.write_data`."""
        tensors: dict[str, torch.Tensor] = {}
        results = []
        for item in plan.items:
            data = planner.resolve_data(item)
            assert isinstance(data, torch.Tensor), "a checkpoint holds tensors only; all else is JSON"
            tensor = data.detach().cpu().contiguous()
            # pieces of one buffer share its storage, which safetensors refuses
            tensors[_key(item.index)] = tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor
            results.append(WriteResult(item.index, tensor.nbytes, data_file(self.rank)))
        self.target.write_tensors(data_file(self.rank), tensors)
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """See `StorageWriter.finish`."""
        files = {_key(result.index): result.storage_data for part in results for result in part}
        tensors: dict[str, TensorEntry] = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            tensors[name] = {
                "dtype": cast(DataType, str(entry.properties.dtype).removeprefix("torch.")),
                "shape": list(entry.size),
                "pieces": [
                    (list(chunk.offsets), list(chunk.sizes), files[_key(MetadataIndex(name, chunk.offsets))])
                    for chunk in entry.chunks
                ],
            }
        self.target.write_text(INDEX, json.dumps(tensors))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """See `StorageWriter.validate_checkpoint_id`."""
        return True


def read_index(folder: Location) -> dict[str, TensorEntry]:
    """Read the index of a checkpoint: every tensor by its global name. Raises CheckpointError naming what is wrong."""
    return records.read_index(folder / INDEX)


class SafeReader(StorageReader):
    """Reads what `SafeWriter` wrote, from any number of ranks, to any number."""

    def __init__(self, folder: Location) -> None:
        """Read from the checkpoint in `folder`."""
        self.folder, self._tensors = folder, TensorFiles(folder)
        self._files: dict[MetadataIndex, str] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        """See `StorageReader.reset`."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """See `StorageReader.read_metadata`."""
        tensors: dict[str, STORAGE_TYPES] = {}
        for name, entry in read_index(self.folder).items():
            dtype = getattr(torch, entry["dtype"])
            chunks = []
            for offsets, sizes, file in entry["pieces"]:
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                self._files[MetadataIndex(name, torch.Size(offsets))] = file
            tensors[name] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(entry["shape"]), chunks)
        return Metadata(tensors)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Look up where each piece lies, on this rank too: the metadata came from the coordinator."""
        if not self._files:
            self.read_metadata()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """See `StorageReader.prepare_local_plan`."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """See `StorageReader.prepare_global_plan`."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """See `StorageReader.read_data`."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            assert item.type == LoadItemType.TENSOR, "a checkpoint holds tensors only; all else is JSON"
            by_file.setdefault(self._files[item.storage_index], []).append(item)
        for name, items in by_file.items():
            with self._tensors.open(name) as file:
                # in the order of the file, so that no extent of it is read twice
                for item in sorted(items, key=lambda item: _key(item.storage_index)):
                    piece = file.get_slice(_key(item.storage_index))
                    part = region(item.storage_offsets, item.lengths)
                    target = planner.resolve_tensor(item)
                    # scalars have no axis to slice
                    target.detach().copy_(piece[part] if part else file.get_tensor(_key(item.storage_index)))
                    planner.commit_tensor(item, target)
        return _done(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """See `StorageReader.validate_checkpoint_id`."""
        return True


class TensorFiles:
    """The tensor files of a checkpoint; those in an object store are opened once each, by their ranges."""

    def __init__(self, folder: Location) -> None:
        """Read from the checkpoint in `folder`."""
        self.folder = folder
        self._objects: dict[str, TensorObject] = {}

    @contextmanager
    def open(self, name: str) -> Iterator[Any]:  # safetensors ships no types
        """Open a file as `safetensors.safe_open` does. Raises CheckpointError naming it, also of what is read in it."""
        path = self.folder / name
        try:
            if isinstance(path, ObjectPath):
                yield self._object(path)
            else:
                with safe_open(path, framework="pt") as file:
                    yield file
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error})") from None

    def _object(self, path: ObjectPath) -> TensorObject:
        """Return the file at `path`, opened if it is not yet."""
        if path.name not in self._objects:
            if path.name not in self._manifest["files"]:
                raise CheckpointError(f"{path}: is not in {MANIFEST}")
            self._objects[path.name] = TensorObject(path, self._manifest["files"][path.name])
        return self._objects[path.name]

    @cached_property
    def _manifest(self) -> Manifest:
        """Sizes and hashes of the files."""
        return records.read_manifest(self.folder / MANIFEST)

    def pieces(self, name: str, entry: TensorEntry) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """Yield offsets and values of the stored pieces of tensor `name`, whose index entry is `entry`.

        Raises CheckpointError where they are not the whole tensor, or not in their files.
        """
        records.check_pieces(self.folder / INDEX, name, entry)
        for offsets, sizes, file in entry["pieces"]:
            key = _key(MetadataIndex(name, torch.Size(offsets)))
            with self.open(file) as opened:
                value = opened.get_tensor(key)
            if list(value.shape) != sizes:
                raise CheckpointError(f"{self.folder / file}: {key} has shape {list(value.shape)}, not {sizes}")
            yield tuple(offsets), value

    def check(self, index: Mapping[str, TensorEntry]) -> None:
        """Raise CheckpointError unless every piece of an index is in its file, in its shape and type.

        Reads the headers of files alone.
        """
        by_file: dict[str, list[tuple[str, list[int], str]]] = {}
        for name, entry in index.items():
            for offsets, sizes, file in entry["pieces"]:
                key = _key(MetadataIndex(name, torch.Size(offsets)))
                by_file.setdefault(file, []).append((key, sizes, entry["dtype"]))
        for file, pieces in by_file.items():
            with self.open(file) as opened:
                there = set(opened.keys())
                for key, sizes, dtype in pieces:
                    if key not in there:
                        raise CheckpointError(f"{self.folder / file}: {key} is missing, which {INDEX} says it holds")
                    piece = opened.get_slice(key)
                    found, wanted = (piece.get_dtype(), list(piece.get_shape())), (DTYPES[getattr(torch, dtype)], sizes)
                    if found != wanted:
                        raise CheckpointError(
                            f"{self.folder / file}: {key} is {' '.join(map(str, found))}, but "
                            f"{' '.join(map(str, wanted))} in {INDEX}"
                        )
