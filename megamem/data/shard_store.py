"""A store of documents in token shards, local or remote."""

import io
import json
import os
import resource
from bisect import bisect_right
from functools import lru_cache
from pathlib import Path
from tarfile import TarError, TarInfo
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from megamem.data.cache import ShardCache, read_remote
from megamem.data.store import Int64
from megamem.errors import DataError
from megamem.files import sha256
from tokenization.shard_format import DOCUMENT, INDEX_FILE, TAR_BLOCK, FileRecord, ShardIndex, key_of, padded

OPEN_REMOTE = 4
"""Copies of remote shards that are kept open at a time: they hold disk space even after the cache deleted them."""
FILES, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
"""Files that this process may have open."""
_open_local = lru_cache(None if FILES == resource.RLIM_INFINITY else FILES // 2)(io.FileIO)
"""Opens a local shard; the last ones stay open, for all stores together."""


class ShardStore:
    """Documents in token shards: a local folder, or with `cache` the URL of one.

    The table of documents is mapped into memory and read where it is needed, so that all processes of a node share it.
    """

    def __init__(self, path: str, cache: ShardCache | None = None) -> None:
        """Read the index and map the table of documents.

        Args:
            path: the folder or its URL.
            cache: holds copies of a URL's files; none for a local folder.

        Raises:
            DataError: a file is missing, truncated, damaged or foreign; the message names it.
            StoreError: the store of a URL does not answer.
        """
        self.path = path.rstrip("/")
        self.cache = cache
        where = f"{self.path}/{INDEX_FILE}"
        self.index = ShardIndex.parse(read_remote(where, cache.retry_s) if cache else _read_local(where), where)
        if self.index.documents == 0:
            raise DataError(f"{self.path}: empty corpus, it holds no document")
        self.table = self._documents()
        self.lengths = self.table["tokens"].view(np.int64)
        self.shard_borders = _first_documents(self.table["shard"], len(self.index.shards))
        self.end_of_document: int | None = self.index.header.eos_id
        self.fingerprint = self.index.fingerprint
        self.vocab_size: int | None = self.index.header.vocab_size
        self.tokenizer_hash: str | None = self.index.header.tokenizer_sha256
        self.dtype = np.dtype(self.index.header.dtype).newbyteorder("<")
        self._checked = np.zeros(len(self.index.shards), np.bool_)
        self._open_remote = lru_cache(OPEN_REMOTE)(self._fetch)

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.table)

    def tokens(self, document: int, start: int, stop: int) -> Int64:
        """See `DocumentStore.tokens`. A shard is opened and checked when something in it is first read.

        Raises:
            DataError: the document's shard is missing, truncated or foreign.
        """
        shard, offset, length, _ = self.table[document].item()
        assert 0 <= start <= stop <= length, (document, start, stop)
        size = self.dtype.itemsize
        return np.frombuffer(self._read(shard, offset + start * size, (stop - start) * size), self.dtype).astype(
            np.int64
        )

    def labels(self, document: int, start: int, stop: int) -> Int64:
        """Return the tokens that follow, [stop - start]."""
        return self.tokens(document, start + 1, stop + 1)

    def name(self, document: int) -> str:
        """Return the document's name, read from the JSON member behind its tokens."""
        shard, offset, length, _ = self.table[document].item()
        header = offset + padded(length * self.dtype.itemsize)
        member = TarInfo.frombuf(self._read(shard, header, TAR_BLOCK), "utf-8", "strict")
        return str(json.loads(self._read(shard, header + TAR_BLOCK, member.size))["name"])

    def check_files(self) -> None:
        """Raise DataError unless every shard of a local folder exists and has its size."""
        if self.cache is None:
            for record in self.index.shards:
                check_size(Path(self.path) / record.file, record)

    def _documents(self) -> npt.NDArray[np.void]:
        """Map the table of documents: [documents] records of type `DOCUMENT`."""
        record = self.index.documents_file
        where = f"{self.path}/{record.file}"
        if self.cache is None:
            check_size(Path(where), record)
        with self.cache.open(where, record) if self.cache else Path(where).open("rb") as file:
            if self.cache is None:
                _check_table(file, record, where)
            try:
                np.lib.format.read_magic(file)
                shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            except ValueError:
                raise DataError(f"{where}: damaged, not a table of documents") from None
            if dtype != DOCUMENT or shape != (self.index.documents,):
                raise DataError(f"{where}: truncated or foreign: it does not match {INDEX_FILE}")
            table: npt.NDArray[np.void] = np.memmap(file, dtype, "r", file.tell(), shape).view(np.ndarray)
        return table

    def _read(self, shard: int, offset: int, size: int) -> bytes:
        """Read bytes of a shard. A call per document is cheaper than the page faults of mapped files."""
        # named: a file that other threads' reads push out meanwhile would be closed, and its number another file's
        file = self._open(shard)
        data = os.pread(file.fileno(), size, offset)
        if len(data) != size:
            raise DataError(f"{self.path}/{self.index.shards[shard].file}: truncated while it was open")
        return data

    def _open(self, shard: int) -> BinaryIO | io.FileIO:
        """Open a shard's file, or give the open one; a local file is checked the first time."""
        if self.cache is not None:
            return self._open_remote(shard)
        path = f"{self.path}/{self.index.shards[shard].file}"
        if not self._checked[shard]:
            self._check_shard(shard, Path(path))
        try:
            return _open_local(path)
        except OSError as error:
            raise DataError(f"{path}: cannot be opened ({error.strerror})") from None

    def _fetch(self, shard: int) -> BinaryIO:
        """Open the copy of a remote shard."""
        assert self.cache is not None
        record = self.index.shards[shard]
        return self.cache.open(f"{self.path}/{record.file}", record)

    def _check_shard(self, shard: int, path: Path) -> None:
        """Raise DataError unless a shard's file has its size, and its first and last document are in their places."""
        check_size(path, self.index.shards[shard])
        first, last = self.shard_borders[shard : shard + 2]
        with path.open("rb") as file:
            for document in {int(first), int(last) - 1}:
                self._check_member(path, file, document)
        self._checked[shard] = True

    def _check_member(self, path: Path, file: BinaryIO, document: int) -> None:
        """Raise DataError unless the tar header before a document's tokens names that document."""
        _, offset, length, _ = self.table[document].item()
        try:
            member = TarInfo.frombuf(os.pread(file.fileno(), TAR_BLOCK, offset - TAR_BLOCK), "utf-8", "strict")
            found = (member.name, member.size)
        except TarError:
            found = ("", 0)
        parts = self.index.first_documents
        number = document - parts[bisect_right(parts, document) - 1]
        if found != (f"{key_of(number)}.tokens", length * self.dtype.itemsize):
            raise DataError(f"{path}: foreign shard: document {document} of {INDEX_FILE} is not in its place")


def _first_documents(shard_ids: npt.NDArray[np.uint32], shards: int) -> Int64:
    """Return the number of each shard's first document, and of all documents, [shards + 1].

    Bisects, and so reads little of the column `shard_ids` [documents], which is ascending.
    """
    wanted = np.arange(shards + 1)
    low, high = np.zeros(shards + 1, np.int64), np.full(shards + 1, len(shard_ids))
    while (unknown := low < high).any():
        middle = (low + high) // 2
        below = unknown & (shard_ids[np.minimum(middle, len(shard_ids) - 1)] < wanted)
        low = np.where(below, middle + 1, low)
        high = np.where(unknown & ~below, middle, high)
    return low


def check_size(path: Path, record: FileRecord) -> None:
    """Raise DataError unless `path` exists and has the size of its record."""
    if not path.is_file():
        raise DataError(f"{path}: missing (listed in {INDEX_FILE})")
    size = path.stat().st_size
    if size < record.size:
        raise DataError(f"{path}: truncated: {size:,} of {record.size:,} bytes")
    if size > record.size:
        raise DataError(f"{path}: foreign shard: {size:,} bytes, {INDEX_FILE} says {record.size:,}")


_sound_tables: set[tuple[object, ...]] = set()
"""Tables whose hash this process knows to be right: where they lie, and their files' state then."""


def _check_table(file: BinaryIO, record: FileRecord, where: str) -> None:
    """Raise DataError unless the table of documents in an open file is as its record says.

    Every place in a shard is read from it: one wrong bit, and what lies there is taken for other tokens.
    """
    state = os.fstat(file.fileno())
    known = (where, record.sha256, state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns)
    if known not in _sound_tables:
        if sha256(file) != record.sha256:
            raise DataError(f"{where}: damaged or foreign: its SHA-256 is not the one in {INDEX_FILE}")
        _sound_tables.add(known)
        file.seek(0)


def _read_local(path: str) -> bytes:
    """Read a local file whole. Raises DataError naming it."""
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path}: missing") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
