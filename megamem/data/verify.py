"""The full check of a folder of token shards: every byte is read."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

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
    store.check_files()
    index = store.index
    # the table of documents, the last file, holds none
    borders = pairwise([*store.shard_borders.tolist(), len(store)])
    for (first, last), record in zip(borders, (*index.shards, index.documents_file), strict=True):
        if sha256_file(folder / record.file) != record.sha256:
            raise DataError(f"{folder / record.file}: damaged: its SHA-256 is not the one in {INDEX_FILE}")
        for document in range(first, last):
            tokens = store.tokens(document, 0, int(store.lengths[document]))
            if tokens[-1] != index.header.eos_id or tokens.max() >= index.header.vocab_size:
                raise DataError(f"{folder / record.file}: foreign: document {document} is not of this tokenizer")
        on_progress(record.size)
    return index
