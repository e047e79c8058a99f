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

from megamem.errors import DataError, MegamemError
from megamem.files import sha256
from megamem.patience import DISK_ERRORS, RETRY_S, STOP_S, check_not_stopped, patiently, reason, unless_stopped
from tokenization.shard_format import FileRecord

COPY_BYTES = 1 << 22
"""Bytes that are read from a remote file at a time."""
POLL_S = 0.05
"""Seconds between two looks whether another process has fetched a shard."""
_sound: set[Path] = set()
"""Copies whose hash this process knows to be right."""


def forget_checks() -> None:
    """Make this process check each copy of a remote shard again."""
    _sound.clear()


def read_remote(url: str, retry_s: float = RETRY_S) -> bytes:
    """Read a small remote file whole. retry_s: seconds for which it is tried again.

    Raises:
        StoreError: the store has not answered for so long.
        DataError: the file cannot be read for another reason; the message has the URL and the reason.
    """

    def read() -> bytes:
        with fsspec.open(url, "rb") as file:
            data: bytes = file.read()
            return data

    try:
        return patiently(url, lambda: unless_stopped(url, read), retry_s)
    except MegamemError:
        raise
    except Exception as error:  # file systems raise errors of their own libraries
        raise DataError(f"{url}: cannot be read ({reason(error)})") from None


class ShardCache:
    """Whole-file copies in `folder`, at most `limit` bytes together; the least recently used go first.

    A copy appears under its final name only when it is on the disk and its hash is right; each process checks a copy
    that is there already when it first opens it, and a damaged one is fetched again. Each file is fetched once per
    host: processes that want it meanwhile wait. Place the folder on a local file system.
    """

    def __init__(self, folder: Path, limit: int, retry_s: float = RETRY_S) -> None:
        """Describe a cache; nothing is created before a shard is opened.

        Args:
            folder: holds the copies.
            limit: bytes of all copies together.
            retry_s: seconds for which a store that does not answer is tried again.
        """
        self.folder = folder
        self.limit = limit
        self.retry_s = retry_s

    def open(self, url: str, record: FileRecord) -> BinaryIO:
        """Open the local copy of `url`, checked against `record` and fetched if need be.

        Raises:
            DataError: the file is missing, damaged, or larger than the cache, or the copy cannot be written.
            StoreError: the store has not answered for `retry_s` seconds.
        """
        if record.size > self.limit:
            raise DataError(f"{url}: {record.size:,} bytes do not fit a shard cache of {self.limit:,}; raise cache_gib")
        path = self.folder / f"{hashlib.sha256(f'{url} {record.sha256}'.encode()).hexdigest()[:24]}.shard"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            while True:
                file = self._kept(path)
                if file is None:
                    self._fetch(url, record, path)
                elif self._is_sound(path, file, record):
                    return file
        except OSError as error:
            raise DataError(
                f"{self.folder}: no copy of {url} can be kept there ({error.strerror or error}); "
                "choose another data.cache_folder or make room"
            ) from None

    def _kept(self, path: Path) -> BinaryIO | None:
        """Open a copy, if there is one."""
        with locked(self.folder / "lock"):
            if not path.exists():
                return None
            _mark_used(path)
            # opened under the lock: it may be deleted right after
            return path.open("rb")

    def _is_sound(self, path: Path, file: BinaryIO, record: FileRecord) -> bool:
        """Return whether an open copy is as its record says; one that is not is closed and deleted.

        A machine that went down, or a disk that fails, may have left anything under its name.
        """
        if path in _sound:
            return True
        if sha256(file) == record.sha256:
            file.seek(0)
            _sound.add(path)
            return True
        with locked(self.folder / "lock"), file:
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                path.unlink()
        return False

    def _fetch(self, url: str, record: FileRecord, path: Path) -> None:
        """Make the copy at `path`, or wait until the process that makes it is done."""
        part = path.with_suffix(".part")
        with locked(self.folder / "lock"):
            if path.exists():
                return
            file = part.open("ab")
            mine = _try_lock(file)
            if mine:
                file.truncate(0)
                self._make_room(record.size)
                # claims the space before the lock is given back
                file.truncate(record.size)
        with file:
            while not mine:
                # the process that fetches the shard lets go of it at the end, whatever comes of it
                time.sleep(POLL_S)
                check_not_stopped(url)
                if _try_lock(file):
                    return
            try:
                _download(url, record, part, self.retry_s)
            except BaseException:
                part.unlink(missing_ok=True)
                raise
            with locked(self.folder / "lock"):
                _mark_used(part)
                part.replace(path)
                _sound.add(path)

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


def _download(url: str, record: FileRecord, part: Path, retry_s: float) -> None:
    """Copy a remote file to `part`, force it to the disk and check its hash as it lies there.

    Raises:
        DataError: the file is missing, cannot be fetched or is not the one of the record.
        StoreError: the store has not answered for `retry_s` seconds.
        OSError: the copy cannot be written.
    """
    with part.open("r+b") as target:

        def copy() -> None:
            target.seek(0)
            with fsspec.open(url, "rb") as source:
                while data := source.read(COPY_BYTES):
                    check_not_stopped(url, STOP_S)
                    target.write(data)

        try:
            patiently(url, lambda: unless_stopped(url, copy), retry_s)
        except MegamemError:
            raise
        except FileNotFoundError:
            raise DataError(f"{url}: missing") from None
        except Exception as error:  # file systems raise errors of their own libraries
            if isinstance(error, OSError) and error.errno in DISK_ERRORS:
                raise
            raise DataError(f"{url}: cannot be fetched ({reason(error)})") from None
        target.truncate()
        target.flush()
        os.fsync(target.fileno())
        target.seek(0)
        if sha256(target) != record.sha256:
            raise DataError(f"{url}: truncated or foreign: its SHA-256 is not the one in the index")


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
