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
LARGEST_PART = 1 << 26
"""Bytes of a file that is read whole that are asked for at a time."""
T = TypeVar("T")


def open_remote(url: str, size: int, retry_s: float = RETRY_S) -> BinaryIO:
    """Open a remote file of `size` bytes for reading; it is streamed.

    retry_s: seconds for which a store that does not answer is tried again, at any place of the file.

    Raises:
        StoreError: the store has not answered for so long; reading raises it too.
        DataError: the file has another size than it was listed with; reading, which opens it again, raises it too.
    """
    return cast(BinaryIO, io.BufferedReader(_RemoteFile(url, size, retry_s), READ_BYTES))


class _RemoteFile(io.RawIOBase):
    """A remote file that survives failures of its store."""

    def __init__(self, url: str, size: int, retry_s: float) -> None:
        self._url, self._size, self._retry_s = url, size, retry_s
        self._at = 0
        self._file: Any = None  # fsspec ships no types
        self._streamed = False
        self._seekable: bool | None = None
        self._tried(lambda file: None)

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return whether the store gives files from any place; it is asked for the last byte to find out."""

        def last_byte(file: Any) -> bool:
            file.seek(self._size - 1)
            return bool(file.read(1))

        if self._seekable is None:
            try:
                self._seekable = not self._size or self._tried(last_byte)
                self.seek(self._at)
            except ValueError:  # a stream from the start, whatever it says of itself
                self._seekable = False
        return self._seekable

    def readinto(self, buffer: Any) -> int:
        """Fill the start of a writable buffer and return the bytes; 0 at the end."""
        data = self._tried(lambda file: self._part(file, len(buffer))) if len(buffer) else b""
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def readall(self) -> bytes:
        """Return all that is left, in large parts: a request for much would take longer than stores allow."""
        parts = []
        while data := self._tried(lambda file: self._part(file, LARGEST_PART)):
            self._at += len(data)
            parts.append(data)
        return b"".join(parts)

    def _part(self, file: Any, size: int) -> bytes:
        """Return the next bytes of an open file, at most `size`; none at its end."""
        data: bytes = file.read(size)
        if not data and self._at < self._size:
            raise ConnectionError(f"ended after {self._at} of {self._size} bytes")
        return data

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
            except Exception as error:  # file systems raise errors of their own libraries
                self._file = None
                if self._streamed or "range requests" not in str(error):
                    raise
            # a server that gives whole files only, as fsspec notices when it asks for a part
            self._streamed = True
            return attempt()

        return patiently(self._url, attempt, self._retry_s)

    def _opened(self) -> Any:
        """Open the file at the place up to which it was read."""
        file = fsspec.open(self._url, "rb", **({"block_size": 0} if self._streamed else {})).open()
        size = getattr(file, "size", self._size)
        if size not in (None, self._size):
            raise DataError(f"{self._url}: had {self._size} bytes when it was listed and has {size} now; start again")
        if self._at:
            self._go_on(file)
        return file

    def _go_on(self, file: Any) -> None:
        """Go to the place up to which it was read, in a file that was opened again."""
        try:
            file.seek(self._at)
        except ValueError:  # one that is streamed from its start
            left = self._at
            while left and (passed := file.read(min(left, READ_BYTES))):
                left -= len(passed)
