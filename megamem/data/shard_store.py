"""A store of documents in token shards, local or remote."""

import io
import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from tarfile import TarError, TarInfo

import numpy as np
import numpy.typing as npt

from megamem.data.cache import ShardCache, read_remote
from megamem.data.store import Int64
from megamem.errors import DataError
from tokenization.shard_format import DOCUMENT, INDEX_FILE, TAR_BLOCK, FileRecord, ShardIndex, key_of, padded

MAPPED_LOCAL = 256
"""Shards of a local folder that are kept mapped at a time."""
MAPPED_REMOTE = 4
"""Copies of remote shards that are kept mapped at a time: they hold disk space even after the cache deleted them."""


class ShardStore:
    """Documents in token shards: a local folder, or with `cache` the URL of one."""

    def __init__(self, path: str, cache: ShardCache | None = None) -> None:
        """Read the index, and check the shards of a local folder. Raises DataError naming the bad file."""
        self.path = path.rstrip("/")
        self.cache = cache
        where = f"{self.path}/{INDEX_FILE}"
        self.index = ShardIndex.parse(read_remote(where) if cache else _read_local(where), where)
        if self.index.documents == 0:
            raise DataError(f"{self.path}: empty corpus, it holds no document")
        self.table = self._documents()
        self.lengths = self.table["tokens"].astype(np.int64)
        self.shard_borders = np.searchsorted(self.table["shard"], np.arange(len(self.index.shards) + 1))
        self.end_of_document: int | None = self.index.header.eos_id
        self.fingerprint = self.index.fingerprint
        self.vocab_size: int | None = self.index.header.vocab_size
        self.tokenizer_hash: str | None = self.index.header.tokenizer_sha256
        mapped = MAPPED_REMOTE if cache else MAPPED_LOCAL
        self._map: Callable[[int], npt.NDArray[np.uint8]] = lru_cache(mapped)(self._map_shard)
        if cache is None:
            self._check_shards()

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.lengths)

    def tokens(self, document: int, start: int, stop: int) -> Int64:
        """See `DocumentStore.tokens`."""
        assert 0 <= start <= stop <= self.lengths[document], (document, start, stop)
        record, dtype = self.table[document], np.dtype(self.index.header.dtype).newbyteorder("<")
        first = int(record["offset"]) + start * dtype.itemsize
        data = self._map(int(record["shard"]))[first : first + (stop - start) * dtype.itemsize]
        return data.view(dtype).astype(np.int64)

    def labels(self, document: int, start: int, stop: int) -> Int64:
        """Return the tokens that follow, [stop - start]."""
        return self.tokens(document, start + 1, stop + 1)

    def name(self, document: int) -> str:
        """Return the document's name, read from the JSON member behind its tokens."""
        record = self.table[document]
        size = int(record["tokens"]) * np.dtype(self.index.header.dtype).itemsize
        header = int(record["offset"]) + padded(size)
        shard = self._map(int(record["shard"]))
        member = TarInfo.frombuf(shard[header : header + TAR_BLOCK].tobytes(), "utf-8", "strict")
        meta = json.loads(shard[header + TAR_BLOCK : header + TAR_BLOCK + member.size].tobytes())
        return str(meta["name"])

    def _documents(self) -> npt.NDArray[np.void]:
        """Read the table of documents: [documents] records of type `DOCUMENT`."""
        record = self.index.documents_file
        where = f"{self.path}/{record.file}"
        if self.cache is not None:
            with self.cache.open(where, record) as file:
                data = file.read()
        else:
            data = _read_local(where)
        try:
            table: npt.NDArray[np.void] = np.load(io.BytesIO(data), allow_pickle=False)
        except ValueError:
            raise DataError(f"{where}: damaged, not a table of documents") from None
        if len(data) != record.size or table.dtype != DOCUMENT or len(table) != self.index.documents:
            raise DataError(f"{where}: truncated or foreign: it does not match {INDEX_FILE}")
        return table

    def _map_shard(self, shard: int) -> npt.NDArray[np.uint8]:
        """Map a shard's file into memory, fetching a remote one: [bytes]."""
        record = self.index.shards[shard]
        where = f"{self.path}/{record.file}"
        if self.cache is None:
            return np.memmap(where, dtype=np.uint8, mode="r")
        with self.cache.open(where, record) as file:
            return np.memmap(file, dtype=np.uint8, mode="r")

    def _check_shards(self) -> None:
        """Check every shard of a local folder: its size, and the tar headers of its first and last documents."""
        for shard, record in enumerate(self.index.shards):
            path = Path(self.path) / record.file
            check_size(path, record)
            first, last = self.shard_borders[shard : shard + 2]
            with path.open("rb") as file:
                for document in {int(first), int(last) - 1}:
                    self._check_member(path, file, document)

    def _check_member(self, path: Path, file: io.BufferedReader, document: int) -> None:
        """Raise DataError unless the tar header before a document's tokens names that document."""
        record = self.table[document]
        file.seek(int(record["offset"]) - TAR_BLOCK)
        try:
            member = TarInfo.frombuf(file.read(TAR_BLOCK), "utf-8", "strict")
            found = (member.name, member.size)
        except TarError:
            found = ("", 0)
        size = int(record["tokens"]) * np.dtype(self.index.header.dtype).itemsize
        if found != (f"{key_of(document)}.tokens", size):
            raise DataError(f"{path}: foreign shard: document {document} of {INDEX_FILE} is not in its place")


def check_size(path: Path, record: FileRecord) -> None:
    """Raise DataError unless `path` exists and has the size of its record."""
    if not path.is_file():
        raise DataError(f"{path}: missing (listed in {INDEX_FILE})")
    size = path.stat().st_size
    if size < record.size:
        raise DataError(f"{path}: truncated: {size:,} of {record.size:,} bytes")
    if size > record.size:
        raise DataError(f"{path}: foreign shard: {size:,} bytes, {INDEX_FILE} says {record.size:,}")


def _read_local(path: str) -> bytes:
    """Read a local file whole. Raises DataError naming it."""
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path}: missing") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
