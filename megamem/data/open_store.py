"""The opening of sources that a configuration names: shard folders, Megatron files, synthetic tasks."""

from pathlib import Path

from megamem.data.cache import ShardCache
from megamem.data.shard_store import ShardStore
from megamem.data.store import DocumentStore
from megamem.data.tasks.store import TaskStore
from megamem.errors import DataError


def open_store(path: str, cache: ShardCache) -> DocumentStore:
    """Open a shard folder, a Megatron prefix, the URL of a shard folder or a task's description, and check its files.

    Raises:
        DataError: a file is missing, truncated or foreign; the message names it.
    """
    if "://" in path:
        return ShardStore(path, cache)
    if path.endswith((".yaml", ".yml")):
        return TaskStore(path)
    if Path(f"{path}.idx").exists() or Path(f"{path}.bin").exists():
        from megamem.data.megatron import MegatronStore

        return MegatronStore(path)
    if not Path(path).exists():
        raise DataError(f"{path}: no such shard folder, and no {path}.idx")
    return ShardStore(path)
