"""Bounded local copies of remote shards, shared by all processes of a host."""

import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import fsspec

from megamem.errors import DataError
from tokenization.shard_format import FileRecord

COPY_BYTES = 1 << 22
"""Bytes that are read from a remote file at a time."""
ATTEMPTS = 3
"""Downloads that may fail before a shard is given up."""


def read_remote(url: str) -> bytes:
    """Read a small remote file whole. Raises DataError naming the URL and the reason."""
    try:
        with fsspec.open(url, "rb") as file:
            data: bytes = file.read()
            return data
    except Exception as error:  # file systems raise errors of their own libraries
        raise DataError(f"{url}: cannot be read ({_reason(error)})") from None


class ShardCache:
    """Whole-file copies in `folder`, at most `limit` bytes together; the least recently used go first.

    A copy appears under its final name only when complete and its hash is right. Each file is fetched once per
    host: processes that want it meanwhile wait. Place the folder on a local file system.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        """Describe a cache; nothing is created before a shard is opened. limit: bytes of all copies together."""
        self.folder = folder
        self.limit = limit

    def open(self, url: str, record: FileRecord) -> BinaryIO:
        """Open the local copy of `url`, checked against `record` and fetched if need be.

        Raises:
            DataError: the file is missing, damaged, or larger than the cache.
        """
        if record.size > self.limit:
            raise DataError(f"{url}: {record.size:,} bytes do not fit a shard cache of {self.limit:,}; raise cache_gib")
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{hashlib.sha256(f'{url} {record.sha256}'.encode()).hexdigest()[:24]}.shard"
        part = path.with_suffix(".part")
        while True:
            with locked(self.folder / "lock"):
                if path.exists():
                    _mark_used(path)
                    # opened under the lock: it may be deleted right after
                    return path.open("rb")
                file = part.open("ab")
                mine = _try_lock(file)
                if mine:
                    file.truncate(0)
                    self._make_room(record.size)
                    # claims the space before the lock is given back
                    file.truncate(record.size)
            with file:
                if not mine:
                    # wait until the process that fetches the shard is done
                    fcntl.flock(file, fcntl.LOCK_EX)
                    continue
                _download(url, record, part)
                with locked(self.folder / "lock"):
                    _mark_used(part)
                    part.replace(path)

    def _make_room(self, needed: int) -> None:
        """Delete the least recently used copies, and parts that nobody is writing, until `needed` bytes fit."""
        files = sorted(
            (path for path in self.folder.iterdir() if path.suffix in (".shard", ".part")),
            key=lambda path: path.stat().st_mtime_ns,
        )
        total = sum(path.stat().st_size for path in files)
        for path in files:
            if total + needed <= self.limit:
                return
            if path.suffix == ".part" and not _abandoned(path):
                continue
            total -= path.stat().st_size
            path.unlink()


def _download(url: str, record: FileRecord, part: Path) -> None:
    """Copy a remote file to `part` and check its hash. Raises DataError after `ATTEMPTS` failures."""
    for attempt in range(ATTEMPTS):
        try:
            with fsspec.open(url, "rb") as source, part.open("r+b") as target:
                digest = _copy(source, target)
        except FileNotFoundError:
            part.unlink()
            raise DataError(f"{url}: missing") from None
        except Exception as error:  # file systems raise errors of their own libraries
            if attempt + 1 == ATTEMPTS:
                part.unlink()
                raise DataError(f"{url}: cannot be fetched ({_reason(error)})") from None
            time.sleep(2**attempt)
            continue
        if digest == record.sha256:
            return
        part.unlink()
        raise DataError(f"{url}: truncated or foreign: its SHA-256 is not the one in the index")


def _copy(source: BinaryIO, target: BinaryIO) -> str:
    """Copy a file and return its SHA-256."""
    digest = hashlib.sha256()
    while data := source.read(COPY_BYTES):
        digest.update(data)
        target.write(data)
    return digest.hexdigest()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file."""
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _try_lock(file: BinaryIO) -> bool:
    """Take the lock of a file if nobody else has it; return whether it was taken."""
    with suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _mark_used(path: Path) -> None:
    """Set the modification time by the fine clock: the kernel's own advances in steps of milliseconds."""
    now = time.time_ns()
    os.utime(path, ns=(now, now))


def _abandoned(part: Path) -> bool:
    """Return whether nobody writes a partial copy."""
    with part.open("ab") as file:
        return _try_lock(file)


def _reason(error: Exception) -> str:
    """Return class and first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
