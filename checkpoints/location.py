"""Where checkpoints lie: a local folder, or an object store behind a URL that fsspec knows.

Credentials are those that the store's own library finds in its environment; nothing here reads or keeps any.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeAlias
from uuid import uuid4

from megamem.config.load import read_yaml
from megamem.config.run import RunConfig
from megamem.errors import CheckpointError, ConfigError, StoreError
from megamem.files import sha256_file
from megamem.patience import may_pass

FOLDER = "checkpoints"
"""Name of the folder of checkpoints in a run folder."""
READ_BYTES = 4 * 2**20
"""Bytes of one request where a whole object is read."""
REQUESTS = 16
"""Requests for bytes that are under way at once."""


@dataclass(frozen=True)
class ObjectPath:
    """The name of an object in a store, or what the names of several begin with; has the methods of `Path` we need.

    Every failure is an OSError with the URL and a reason of one line, whichever library talks to the store.
    """

    url: str
    """The whole name, `s3://bucket/prefix/name`, without a slash at its end."""

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        """The last part of the name."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> ObjectPath:
        """The name without its last part."""
        return ObjectPath(self.url.rpartition("/")[0])

    @contextmanager
    def _store(self) -> Iterator[tuple[Any, str]]:  # fsspec ships no types
        """Give the store's file system and the name in it; what goes wrong becomes an OSError of one line."""
        import fsspec  # takes a while, and only runs with a URL need it

        try:
            # a listing that is remembered would hide what other processes write
            yield fsspec.core.url_to_fs(self.url, use_listings_cache=False)
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, error.strerror or "no such object", self.url) from None
        except Exception as error:
            # what will not pass has another number, which is all that another rank gets to see of it (`is_outage`)
            raise OSError(errno.EIO if may_pass(error) else errno.EACCES, _reason(error), self.url) from error

    def facts(self) -> dict[str, Any]:  # what a store says of an object differs
        """Return what the store says of the object: its `size`, perhaps its `ETag`. Raises FileNotFoundError."""
        with self._store() as (store, name):
            return store.info(name)

    def is_file(self) -> bool:
        """Return whether there is an object of this name."""
        try:
            return self.facts()["type"] == "file"
        except FileNotFoundError:
            return False

    def is_dir(self) -> bool:
        """Return whether there are objects whose names begin with this one."""
        return bool(self.entries())

    def entries(self) -> dict[str, int | None]:
        """Return the names below this one, without what follows a further slash, and the size of those of objects."""
        try:
            with self._store() as (store, name):
                found = store.ls(name, detail=True)
        except FileNotFoundError:
            return {}
        sizes = {entry["name"].rstrip("/"): entry["size"] if entry["type"] == "file" else None for entry in found}
        # some stores list an empty object for the folder itself
        own = name.strip("/")
        return {path.rpartition("/")[2]: size for path, size in sizes.items() if path.strip("/") != own}

    def read_text(self, encoding: str) -> str:
        """Return the whole object as text."""
        with self._store() as (store, name):
            return store.cat_file(name).decode(encoding)

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes from each first to each last place, by requests side by side."""
        starts, stops = [start for start, _ in ranges], [stop for _, stop in ranges]
        with self._store() as (store, name):
            return store.cat_ranges([name] * len(ranges), starts, stops, on_error="raise")

    def sha256(self) -> str:
        """Return the hexadecimal SHA-256 of the object, read from the store."""
        size, digest = self.facts()["size"], hashlib.sha256()
        ranges = [(start, min(start + READ_BYTES, size)) for start in range(0, size, READ_BYTES)]
        for first in range(0, len(ranges), REQUESTS):
            for part in self.read_ranges(ranges[first : first + REQUESTS]):
                digest.update(part)
        return digest.hexdigest()

    @contextmanager
    def writing(self, part_bytes: int) -> Iterator[IO[bytes]]:
        """Open the object for writing; it appears at the end of the block, whole, or not at all.

        part_bytes: bytes of each request; a smaller object takes one.
        """
        with self._store() as (store, name):
            file = store.open(name, "wb", block_size=part_bytes)
            try:
                yield file
            except BaseException:
                # closing would make an object of what has been written so far
                file.closed = True
                with contextlib.suppress(Exception):
                    file.discard()
                raise
            file.close()

    def write_bytes(self, data: bytes) -> None:
        """Write a small object."""
        with self._store() as (store, name):
            store.pipe_file(name, data)

    def copy_to(self, other: ObjectPath) -> None:
        """Make the store copy the object to another name."""
        with self._store() as (store, name):
            store.cp_file(name, store._strip_protocol(other.url))

    def unlink(self) -> None:
        """Remove the object, if there is one."""
        with contextlib.suppress(FileNotFoundError), self._store() as (store, name):
            store.rm_file(name)

    def remove_all(self) -> None:
        """Remove all objects below this name."""
        with contextlib.suppress(FileNotFoundError), self._store() as (store, name):
            store.rm(name, recursive=True)
        # some stores go on listing a folder that has become empty
        with contextlib.suppress(FileNotFoundError), self._store() as (store, name):
            store.rm_file(name)

    def abort_uploads(self) -> None:
        """Drop the parts of objects below this name that were never finished: a store may keep them, and charge."""
        with self._store() as (store, name):
            if not hasattr(store, "list_multipart_uploads"):
                return
            bucket, _, prefix = name.partition("/")
            for upload in store.list_multipart_uploads(bucket):
                if upload["Key"].lstrip("/").startswith(f"{prefix}/"):
                    store.abort_mpu(bucket, upload["Key"], upload["UploadId"])


Location: TypeAlias = Path | ObjectPath
"""A local file or folder, or one in an object store."""


def location(path: str | Location) -> Location:
    """Return where `path` points to: a URL into a store, anything else into the local file system."""
    if isinstance(path, ObjectPath):
        return path
    text = str(path).removeprefix("file://")
    if isinstance(path, Path):
        # which keeps one slash of two
        text = re.sub(r"^([a-z][a-z0-9+.-]+):/(?=\w)", r"\1://", text)
    return ObjectPath(text.rstrip("/")) if "://" in text else Path(text)


def run_checkpoints(config: RunConfig) -> Location:
    """Return the folder of a run's checkpoints."""
    folder = config.checkpoint.folder
    return config.run_folder / FOLDER if folder is None else location(folder) / config.full_name


def recorded_checkpoints(run_folder: Path) -> Location:
    """Return the folder of checkpoints that the configuration in a run folder names."""
    with contextlib.suppress(ConfigError, KeyError, TypeError):
        tree: Any = read_yaml(run_folder / "config.yaml")
        if folder := tree["checkpoint"]["folder"]:
            parent = location(folder)
            if tree.get("lesson"):
                parent = parent / Path(tree["runs_folder"]).name
            return parent / tree["name"]
    return run_folder / FOLDER


def entries(folder: Location) -> dict[str, int | None]:
    """Return the names in a folder with the size of those of files; none where there is no such folder."""
    if isinstance(folder, ObjectPath):
        return folder.entries()
    if not folder.is_dir():
        return {}
    return {path.name: path.stat().st_size if path.is_file() else None for path in folder.iterdir()}


def sha256_of(path: Location) -> str:
    """Return the hexadecimal SHA-256 of a file."""
    return path.sha256() if isinstance(path, ObjectPath) else sha256_file(path)


def remove_folder(folder: Location, marker: str) -> None:
    """Remove a folder with all it holds, the file called `marker` first; of a link the link alone. Raises OSError."""
    if isinstance(folder, ObjectPath):
        (folder / marker).unlink()
        folder.remove_all()
    elif folder.is_symlink():
        folder.unlink()
    else:
        (folder / marker).unlink(missing_ok=True)
        shutil.rmtree(folder)


def check_folder(folder: Location) -> None:
    """Write, read and remove a tiny file. A local folder that is not there is not made: its nearest parent is tried.

    Raises: StoreError where a store does not answer, CheckpointError where checkpoints cannot be kept otherwise.
    """
    token = uuid4().hex
    trial = (_nearest(folder) if isinstance(folder, Path) else folder) / f".probe-{token}"
    try:
        trial.write_bytes(token.encode())
        read = trial.read_text("ascii")
        trial.unlink()
    except OSError as error:
        kind = StoreError if is_outage(error) else CheckpointError
        raise kind(f"checkpoint.folder {folder}: checkpoints cannot be kept there ({error.strerror})") from None
    if read != token:
        raise CheckpointError(
            f"checkpoint.folder {folder}: checkpoints cannot be kept there (a file reads otherwise than written)"
        )


def is_outage(error: BaseException) -> bool:
    """Return whether a store did not answer, which may be over later: no failure of a disk, and no refusal."""
    return isinstance(error, OSError) and error.errno == errno.EIO and "://" in str(error.filename)


def _nearest(folder: Path) -> Path:
    """Return the folder, or the nearest of its parents that is there."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def _reason(error: Exception) -> str:
    """Return one line that says what went wrong."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split()) or type(error).__name__
