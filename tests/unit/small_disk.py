"""A disk that is full when a test says so: a small file system where one can be mounted, else one that is played."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

SIZE = 512 * 1024
"""Bytes of the disk."""


class SmallDisk:
    """A folder on a disk of its own, which can be filled and emptied."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def _filler(self) -> Path:
        return self.folder / ".filler"

    def fill(self, leave: int = 0) -> None:
        """Take all room but for `leave` bytes, in pages."""
        with self._filler.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
            file.truncate(max(file.tell() - leave, 0))

    def empty(self) -> None:
        """Give the room back."""
        self._filler.unlink(missing_ok=True)


class PlayedDisk(SmallDisk):
    """One whose files cannot be written while it is full; for those who must not mount anything."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(folder)
        self.full = False
        original = Path.open

        def opened(path: Path, mode: str = "r", *more: Any, **options: Any) -> Any:
            file = original(path, mode, *more, **options)
            return file if mode.startswith("r") or folder not in path.parents else _Watched(file, self)

        monkeypatch.setattr(Path, "open", opened)

    def fill(self, leave: int = 0) -> None:
        self.full = True

    def empty(self) -> None:
        self.full = False


class _Watched:
    """A file that cannot be written while its disk is full."""

    def __init__(self, file: Any, disk: PlayedDisk) -> None:
        self._file, self._disk = file, disk

    def write(self, data: Any) -> Any:
        if self._disk.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _Watched:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


@pytest.fixture(params=["mounted", "played"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    folder = tmp_path / "disk"
    folder.mkdir()
    if request.param == "played":
        yield PlayedDisk(folder, monkeypatch)
        return
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"no mount: {error}")
    if done.returncode != 0:
        pytest.skip(f"not allowed to mount: {done.stderr.strip()}")
    yield SmallDisk(folder)
    subprocess.run(["umount", "-l", str(folder)], check=True)
