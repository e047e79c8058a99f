"""The full check of a folder of token shards: every byte is read."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from megamem.data.shard_store import ShardStore
from megamem.errors import DataError
from megamem.files import sha256_file
from tokenization.shard_format import INDEX_FILE, ShardIndex


def verify_shards(folder: Path, on_progress: Callable[[int], None] = lambda done: None) -> ShardIndex:
    """Read every byte of a shard folder and check hashes, token ids and the end of every document.

    Args:
        folder: the shards.
        on_progress: called with the bytes of each file once it is checked.

    Raises:
        DataError: a file is damaged or foreign; the message names it.
    """
    store = ShardStore(str(folder))
    index = store.index
    for shard, record in enumerate((*index.shards, index.documents_file)):
        if sha256_file(folder / record.file) != record.sha256:
            raise DataError(f"{folder / record.file}: damaged: its SHA-256 is not the one in {INDEX_FILE}")
        for document in np.flatnonzero(store.shard_ids == shard).tolist():
            tokens = store.tokens(document, 0, int(store.lengths[document]))
            if tokens[-1] != index.header.eos_id or tokens.max() >= index.header.vocab_size:
                raise DataError(f"{folder / record.file}: foreign: document {document} is not of this tokenizer")
        on_progress(record.size)
    return index
