"""The opening of sources that a configuration names: shard folders, Megatron files, synthetic tasks."""

from pathlib import Path

from megamem.data.cache import ShardCache
from megamem.data.shard_store import ShardStore
from megamem.data.store import DocumentStore
from megamem.data.tasks.store import TaskStore
from megamem.errors import DataError


def open_store(path: str, cache: ShardCache, end_of_document: int | None = None) -> DocumentStore:
    """Open a shard folder, a Megatron prefix, the URL of a shard folder or a task's description, and check its files.

    Args:
        path: as the configuration names the source.
        cache: holds copies of remote shards.
        end_of_document: token that is to end the documents of Megatron files; they are left as they are if not given.

    Raises:
        DataError: a file is missing, truncated or foreign; the message names it.
    """
    if "://" in path:
        return ShardStore(path, cache)
    if path.endswith((".yaml", ".yml")):
        return TaskStore(path)
    if Path(f"{path}.idx").exists() or Path(f"{path}.bin").exists():
        from megamem.data.megatron import MegatronStore

        return MegatronStore(path, end_of_document)
    if not Path(path).exists():
        raise DataError(f"{path}: no such shard folder, and no {path}.idx")
    return ShardStore(path)
