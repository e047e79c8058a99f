"""The splits of enwik8 and text8: the first 90 million bytes of one file, the next five, the last five."""

import codecs
import errno
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import IO

from megamem.errors import DataError
from megamem.files import require_space, take_place
from tokenization.prepare import SPLITS

SIZES = (90_000_000, 5_000_000, 5_000_000)
"""Bytes of the three splits."""
READ_BYTES = 1 << 20
"""Bytes that are in memory at a time."""


@dataclass(frozen=True)
class SplitSize:
    """What was written of one split."""

    bytes: int
    """Its bytes."""
    characters: int
    """Its characters."""


def split(source: Path, folder: Path, sizes: Sequence[int] = SIZES, line_ends: bool = True) -> dict[str, SplitSize]:
    """Write `folder`/{train,validation,test}/NAME.txt, each one document, and return their sizes.

    A character that lies across a border belongs to the split in which it begins; one that the end of the file cuts
    is left out. The folder appears only when complete.

    Args:
        source: the file, or a zip that holds nothing else.
        folder: where the splits go.
        sizes: bytes of the file in the three splits.
        line_ends: whether line breaks are written; without them the splits have fewer bytes.

    Raises:
        DataError: the file cannot be read, is of another size, or is not UTF-8; or the folder is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{folder}: not an empty folder; choose another one")
    with _opened(source, sum(sizes)) as stream:
        require_space(folder, sum(sizes))
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
            staging = Path(temporary) / "splits"
            try:
                found = _write(stream, source, staging, sizes, line_ends)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                raise DataError(f"{folder}: cannot be written ({error.strerror})") from None
            take_place(staging, folder)
    return found


@contextmanager
def _opened(source: Path, size: int) -> Iterator[IO[bytes]]:
    """Open a file, or the one member of a zip. Raises DataError where it has not `size` bytes or cannot be read."""
    try:
        if source.suffix == ".zip":
            with zipfile.ZipFile(source) as archive:
                members = [member for member in archive.infolist() if not member.is_dir()]
                if len(members) != 1:
                    raise DataError(f"{source}: holds {len(members)} files, not one")
                _check_size(source, members[0].file_size, size)
                with archive.open(members[0]) as stream:
                    yield stream
        else:
            with source.open("rb") as stream:
                _check_size(source, source.stat().st_size, size)
                yield stream
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise DataError(f"{source}: cannot be read ({getattr(error, 'strerror', None) or error})") from None


def _check_size(source: Path, found: int, size: int) -> None:
    """Raise DataError unless a file has the bytes that it should have."""
    if found != size:
        raise DataError(f"{source}: {found:,} bytes, not {size:,} as enwik8 and text8 have")


def _write(
    stream: IO[bytes], source: Path, folder: Path, sizes: Sequence[int], line_ends: bool
) -> dict[str, SplitSize]:
    """Copy the splits into the folders of their names and return their sizes."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    found: dict[str, SplitSize] = {}
    position = 0
    for name, end in zip(SPLITS, accumulate(sizes), strict=True):
        path = folder / name / f"{source.stem}.txt"
        path.parent.mkdir(parents=True)
        characters = 0
        with path.open("wb") as file:
            # what the decoder holds is a character that has begun
            while position < end or decoder.getstate()[0]:
                data = stream.read(min(READ_BYTES, max(end - position, 1)))
                if not data:
                    file.truncate(file.tell() - len(decoder.getstate()[0]))
                    break
                characters += len(_decoded(decoder, data, source, position))
                position += len(data)
                if not line_ends:
                    characters -= data.count(b"\n")
                    data = data.replace(b"\n", b"")
                file.write(data)
        found[name] = SplitSize(path.stat().st_size, characters)
    return found


def _decoded(decoder: codecs.IncrementalDecoder, data: bytes, source: Path, position: int) -> str:
    """Return the text of bytes that begin at a position of a file. Raises DataError where they are not UTF-8."""
    before = len(decoder.getstate()[0])
    try:
        return decoder.decode(data)
    except UnicodeDecodeError as error:
        raise DataError(f"{source}: not UTF-8 at byte {position - before + error.start}; convert it first") from None
