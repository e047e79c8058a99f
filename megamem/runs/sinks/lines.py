"""Lines of a file that grows while a run trains, on a disk that may be full for a while."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from megamem.files import write_bytes

_log = logging.getLogger(__name__)


class GrowingLines:
    """A file to which whole lines are appended; a run goes on, and loses none, while its disk takes none.

    Lines that could not be written are kept in memory and written with the next one that can be.
    """

    def __init__(self, path: Path, keep: Callable[[list[str]], list[str]]) -> None:
        """Open the file.

        Args:
            path: the file; a line without its end, which was being written when a process was killed, is left out.
            keep: given the lines that are there, with their ends, says which lines the file is to begin with. Bytes
                that are not UTF-8 are U+FFFD.
        """
        self.path = path
        there = path.read_bytes() if path.exists() else b""
        lines = there.decode(errors="replace").split("\n")[:-1]
        begin = "".join(keep([f"{line}\n" for line in lines])).encode()
        self._waiting = b"" if begin == there else self._replace(there, begin)
        self._file = path.open("ab", buffering=0)
        self._warned = False

    def _replace(self, there: bytes, begin: bytes) -> bytes:
        """Let the file begin with `begin`. Returns what is still to be written, where the disk takes nothing."""
        try:
            write_bytes(self.path, begin)
        except OSError as error:
            if not there:
                return begin
            _log.warning("%s: keeps lines of steps that are made again (%s)", self.path, error.strerror)
            # whoever reads the file leaves out a line that was cut short, if it ends somewhere
            return b"" if there.endswith(b"\n") else b"\n"
        return b""

    def append(self, line: str) -> None:
        """Write a line, given without its end, or keep it until the disk takes it; a warning says so, once."""
        self._waiting += f"{line}\n".encode()
        self._write()

    def _write(self) -> None:
        try:
            while self._waiting:
                # a disk that fills up takes a part; the rest of the line comes behind it
                taken = self._file.write(self._waiting)
                self._waiting = self._waiting[taken:]
        except OSError as error:
            if not self._warned:
                _log.warning(
                    "%s: cannot be written (%s); training goes on, and lines wait in memory",
                    self.path,
                    error.strerror or os.strerror(error.errno or 0),
                )
            self._warned = True

    def close(self) -> None:
        """Close the file. A warning says how many lines it lacks, if it does."""
        self._write()
        if self._waiting:
            _log.warning("%s: lacks its last %d lines", self.path, self._waiting.count(b"\n"))
        self._file.close()
