"""Helpers for files: hashes, whole-or-nothing writes, free space."""

import fcntl
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import IO, Any

from megamem.errors import DataError


def sha256_file(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return sha256(file)


def sha256(file: IO[bytes]) -> str:
    """Return the hexadecimal SHA-256 of an open file, from where it stands to its end."""
    return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # every open file has readinto


def sync(path: Path) -> None:
    """Force a file's or folder's content to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file whole or not at all: to a temporary name, flushed to disk, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: object) -> None:
    """Write a JSON file whole or not at all."""
    write_bytes(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode("utf-8"))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises DataError naming a file that is missing or damaged."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DataError(f"{path}: missing") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise DataError(f"{path}: not a JSON object")
    return value


def take_place(staging: Path, folder: Path) -> None:
    """Rename a folder to `folder`, which may be an empty folder but holds nothing: what others put there stays.

    Raises: DataError where there is something by now, or it cannot be renamed.
    """
    try:
        # replaces an empty folder, and nothing else, in one step
        staging.rename(folder)
    except OSError as error:
        if folder.is_dir() and any(folder.iterdir()):
            raise DataError(f"{folder}: is no longer empty; what is there stays, choose another folder") from None
        raise DataError(f"{folder}: cannot be written ({error.strerror})") from None


def try_lock(file: IO[str] | IO[bytes]) -> bool:
    """Lock a file unless somebody else holds its lock; return whether this process holds it now.

    On file systems without locks everybody does.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # a file system without locks
        pass
    return True


def require_space(folder: Path, needed: int) -> None:
    """Raise DataError unless `folder` is one or can be made, and its file system has `needed` free bytes."""
    existing = next(parent for parent in [folder.absolute(), *folder.absolute().parents] if parent.exists())
    if not existing.is_dir():
        raise DataError(f"{existing}: is a file, not a folder; choose another folder")
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise DataError(f"{folder}: not enough disk space: {needed:,} bytes needed, {free:,} bytes free")
