"""Reading a file behind a URL from a store that may fail meanwhile: it is opened again and read on where it stopped."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO, TypeVar, cast

import fsspec

from megamem.errors import DataError
from megamem.patience import RETRY_S, patiently

READ_BYTES = 1 << 20
"""Bytes that are asked for at a time."""
T = TypeVar("T")


def open_remote(url: str, size: int, retry_s: float = RETRY_S) -> BinaryIO:
    """Open a remote file of `size` bytes for reading; it is streamed.

    retry_s: seconds for which a store that does not answer is tried again, at any place of the file.

    Raises:
        StoreError: the store has not answered for so long; reading raises it too.
        DataError: while reading, the file was found to have another size when it was opened again.
    """
    return cast(BinaryIO, io.BufferedReader(_RemoteFile(url, size, retry_s), READ_BYTES))


class _RemoteFile(io.RawIOBase):
    """A remote file that survives failures of its store."""

    def __init__(self, url: str, size: int, retry_s: float) -> None:
        self._url, self._size, self._retry_s = url, size, retry_s
        self._at = 0
        self._file: Any = None  # fsspec ships no types
        self._tried(lambda file: None)

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return whether the store gives files from any place."""
        return bool(self._tried(lambda file: file.seekable()))

    def readinto(self, buffer: Any) -> int:
        """Fill the start of a writable buffer and return the bytes; 0 at the end."""

        def some(file: Any) -> bytes:
            data: bytes = file.read(len(buffer))
            if len(buffer) and not data and self._at < self._size:
                raise ConnectionError(f"ended after {self._at} of {self._size} bytes")
            return data

        data = self._tried(some)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to another place and return it."""
        self._at = self._tried(lambda file: int(file.seek(offset, whence)))
        return self._at

    def tell(self) -> int:
        """Return the place."""
        return self._at

    def close(self) -> None:
        """Close it, whatever the store says to that."""
        if self._file is not None:
            with suppress(Exception):
                self._file.close()
        self._file = None
        super().close()

    def _tried(self, work: Callable[[Any], T]) -> T:
        """Return what `work` makes of the open file; after a failure the file is opened again, at the same place."""

        def attempt() -> T:
            if self._file is None:
                self._file = self._opened()
            try:
                return work(self._file)
            except Exception:  # file systems raise errors of their own libraries
                self._file = None
                raise

        return patiently(self._url, attempt, self._retry_s)

    def _opened(self) -> Any:
        """Open the file at the place up to which it was read."""
        file = fsspec.open(self._url, "rb").open()
        if self._at:
            size = getattr(file, "size", self._size)
            if size not in (None, self._size):
                raise DataError(f"{self._url}: had {self._size} bytes and has {size} now; it changed while it was read")
            self._go_on(file)
        return file

    def _go_on(self, file: Any) -> None:
        """Go to the place up to which it was read, in a file that was opened again."""
        try:
            file.seek(self._at)
        except ValueError:  # a server that gives files from their start only
            left = self._at
            while left and (passed := file.read(min(left, READ_BYTES))):
                left -= len(passed)
