"""The folder that token shards are written into: held by one writer; new, to be continued, finished or refused."""

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from io import TextIOWrapper
from itertools import zip_longest
from pathlib import Path
from tarfile import TarError, TarFile

from megamem.errors import DataError
from megamem.files import read_json, try_lock, write_json
from tokenization.readers import InputFile
from tokenization.shard_format import INDEX_FILE, ShardHeader, ShardIndex, difference
from tokenization.sources import documents

WRITING_FILE = "writing.json"
"""Name of the file that holds the header of an unfinished folder."""
RECORDS = "records"
"""Name of the folder of records of finished shards, until `index.json` holds them."""
INPUTS_FILE = ".inputs.json"
"""Name of the file that tells by which state of the inputs a finished folder is known to be theirs."""
LOCK_FILE = ".lock"
"""Name of the file that is there, and locked, while the folder is written."""


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Make a folder and hold it, so that no other process writes there; it goes again if it is empty at the end.

    A finished folder that cannot be written, such as one on a read-only file system, is not held.

    Raises:
        DataError: another process is writing it, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = _locked(folder)
    except OSError as error:
        if not (folder / INDEX_FILE).exists():
            raise DataError(f"{folder}: cannot be written ({error.strerror})") from None
        yield
        return
    with file:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}\n")
        file.flush()
        try:
            yield
        finally:
            (folder / LOCK_FILE).unlink(missing_ok=True)
            with suppress(OSError):
                folder.rmdir()


def _locked(folder: Path) -> TextIOWrapper:
    """Return the open file of the lock of a folder, which is held. Raises DataError where another process holds it."""
    path = folder / LOCK_FILE
    while True:
        file = path.open("a+", encoding="utf-8")
        if not try_lock(file):
            with file:
                file.seek(0)
                holder = file.read().strip() or "unknown"
            raise DataError(f"{folder}: is being written by another command ({holder}); wait for its end")
        # whoever held it before may have removed it since it was opened
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()


def open_folder(
    folder: Path, header: ShardHeader, files: Sequence[InputFile], on_progress: Callable[[int], None]
) -> ShardIndex | None:
    """Return the index of a finished folder; None for a new one or one to continue.

    Args:
        folder: of shards, which `alone` holds.
        header: of those that are to be in it.
        files: that they are to be made of.
        on_progress: called with the bytes of the input files as they are known to be unchanged.

    Raises:
        DataError: it holds anything else.
    """
    index_file, writing_file = folder / INDEX_FILE, folder / WRITING_FILE
    if index_file.exists():
        index = ShardIndex.parse(index_file.read_bytes(), str(index_file))
        _require_same(folder, asdict(index.header), header)
        _require_same_texts(folder, index, files, on_progress)
        shutil.rmtree(folder / RECORDS, ignore_errors=True)
        writing_file.unlink(missing_ok=True)
        return index
    if writing_file.exists():
        # a call that failed before its first shard, over a wrong --text-field say, left nothing to mix with
        if next((folder / RECORDS).glob("*.json"), None):
            _require_same(folder, read_json(writing_file), header)
        for leftover in folder.glob(".shard-*"):
            leftover.unlink()
    elif folder.exists() and any(path.name != writing_file.name for path in folder.glob("[!.]*")):
        raise DataError(f"{folder}: not empty and not a folder of token shards; choose another folder")
    return None


def _require_same(folder: Path, found: Mapping[str, object], header: ShardHeader) -> None:
    """Raise DataError unless a folder was begun under the same header."""
    for key, value in asdict(header).items():
        if found.get(key) != value:
            what, before, now = difference(key, found.get(key), value)
            raise DataError(f"{folder}: holds shards written with {what} ({before}, now {now}); choose another folder")


def note_inputs(folder: Path, files: Sequence[InputFile]) -> None:
    """Note the state of the input files that the shards in a folder are made of. Raises OSError."""
    if (state := _state(files)) is not None:
        write_json(folder / INPUTS_FILE, {"state": state})


def _state(files: Sequence[InputFile]) -> str | None:
    """Return a hash that is another one where a file was changed; None where that cannot be told without reading."""
    if not all(file.stamp for file in files):
        return None
    listing = [[file.name, file.size, file.stamp] for file in files]
    return hashlib.sha256(json.dumps(listing).encode()).hexdigest()


def _require_same_texts(
    folder: Path, index: ShardIndex, files: Sequence[InputFile], on_progress: Callable[[int], None]
) -> None:
    """Raise DataError unless a finished folder holds the documents of the input files.

    Names and sizes do not tell: a text may have been corrected. Files in another state than was noted are read.
    """
    with suppress(DataError):
        if (state := _state(files)) is not None and read_json(folder / INPUTS_FILE).get("state") == state:
            on_progress(sum(file.size for file in files))
            return
    for document, stored in zip_longest(documents(files), _stored(folder, index)):
        found = document and (document.name, hashlib.sha256(document.text.encode()).hexdigest())
        if found != stored:
            name = stored[0] if document is None else document.name
            raise DataError(f"{folder}: holds other texts than the inputs now, first of {name}; choose another folder")
        on_progress(document.source_bytes)
    with suppress(OSError):
        note_inputs(folder, files)


def _stored(folder: Path, index: ShardIndex) -> Iterator[tuple[str, str]]:
    """Yield name and SHA-256 of the text of each document in shards. Raises DataError naming a damaged shard."""
    for record in index.shards:
        path = folder / record.file
        try:
            with TarFile.open(path, "r:") as tar:
                for member in tar:
                    if member.name.endswith(".json") and (content := tar.extractfile(member)) is not None:
                        facts = json.loads(content.read())
                        yield facts["name"], facts["text_sha256"]
        except FileNotFoundError:
            raise DataError(f"{path}: missing (listed in {INDEX_FILE})") from None
        except (OSError, TarError, ValueError, KeyError, TypeError):
            raise DataError(f"{path}: damaged; `megamem shards verify` tells what is") from None
