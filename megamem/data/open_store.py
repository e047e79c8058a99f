"""The opening of sources that a configuration names: shard folders, files of Megatron and `.npy`, synthetic tasks."""

from dataclasses import dataclass
from pathlib import Path

from megamem.data.cache import ShardCache
from megamem.data.npy_store import NpyStore, RawType, is_npy
from megamem.data.shard_store import ShardStore
from megamem.data.store import DocumentStore
from megamem.data.tasks.store import TaskStore
from megamem.errors import DataError
from tokenization.shard_format import INDEX_FILE


@dataclass(frozen=True)
class BareTokens:
    """What files of tokens do not say themselves."""

    end_of_document: int | None = None
    """Token that ends the documents."""
    join: bool = False
    """Whether documents are joined: then the end is added to those of Megatron that lack it."""
    raw_type: RawType | None = None
    """Type of the tokens in `.npy` files without a header."""


def open_store(path: str, cache: ShardCache, bare: BareTokens = BareTokens()) -> DocumentStore:
    """Open a source and check its files: a shard folder or its URL, a Megatron prefix, `.npy` files, or a task.

    Args:
        path: as the configuration names the source.
        cache: holds copies of remote shards, and what is found out once of Megatron's and `.npy` files.
        bare: what Megatron's and `.npy` files do not say.

    Raises:
        DataError: a file is missing, truncated, damaged or foreign; the message names it.
        StoreError: a store does not answer.
    """
    if "://" in path and path.endswith(".npy"):
        raise DataError(f"{path}: .npy files are mapped into memory; copy them to a local folder")
    if "://" in path:
        return ShardStore(path, cache)
    if path.endswith((".yaml", ".yml")):
        return TaskStore(path)
    if Path(f"{path}.idx").exists() or Path(f"{path}.bin").exists():
        from megamem.data.megatron import MegatronStore

        return MegatronStore(path, cache.folder, bare.end_of_document if bare.join else None)
    if is_npy(path) and not (Path(path) / INDEX_FILE).exists():
        return NpyStore(path, bare.end_of_document, bare.raw_type, cache.folder)
    if not Path(path).exists():
        raise DataError(f"{path}: no such shard folder, and no {path}.idx")
    return ShardStore(path)
