"""Where a save writes: a local folder that gets its name at the end, or objects of which the marker is the last."""

from __future__ import annotations

import errno
import hashlib
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from checkpoints.folder import MANIFEST, MARKER, PARTIAL, manifest_text, mark_complete
from checkpoints.location import Location, ObjectPath, remove_folder, sha256_of
from checkpoints.records import FileEntry
from checkpoints.tensor_objects import EXTENT_BYTES, extent_hashes, regrouped
from megamem.files import sha256_file, sync
from megamem.tensor_files import safetensors_stream, write_tensors

T = TypeVar("T")
PART_BYTES = 8 * EXTENT_BYTES
"""Bytes of one request of an upload; smaller files take one request. S3 allows 10,000 of at least 5 MiB."""
RETRY_S = 2.0
"""Seconds between two attempts at a store that does not answer."""


class Target(ABC):
    """A checkpoint that is being written, by all ranks; each knows the files that it has written itself."""

    progress = 0
    """A number that grows while something is done: bytes and attempts. A local disk counts bytes elsewhere."""

    @abstractmethod
    def prepare(self) -> None:
        """Remove what an earlier attempt has left. Rank 0 calls it, before anyone writes."""

    @abstractmethod
    def write_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write a safetensors file. tensors: contiguous tensors on the CPU by key, [...] of any shape."""

    @abstractmethod
    def write_text(self, name: str, text: str) -> None:
        """Write a small file."""

    @abstractmethod
    def written(self) -> dict[str, FileEntry]:
        """Return the files of this rank, which are where they are to stay and as they were written."""

    @abstractmethod
    def complete(self, files: Mapping[str, FileEntry]) -> None:
        """Make it a checkpoint, in one step. Rank 0 calls it, once all ranks have written.

        files: those of all ranks.
        """


def target(final: Location, retry_s: float = 0.0, report: Callable[[str], None] = lambda line: None) -> Target:
    """Return where to write the checkpoint that `final` is to name; the other arguments are those of ObjectTarget."""
    return ObjectTarget(final, retry_s, report) if isinstance(final, ObjectPath) else LocalTarget(final)


class LocalTarget(Target):
    """A folder that is forced to the disk, hashed as it lies there, marked, and then renamed."""

    def __init__(self, final: Path) -> None:
        """Prepare to write; `final` is the checkpoint's name, which it gets at the end."""
        self.final = final
        self.partial = final.with_name(final.name + PARTIAL)
        self._names: list[str] = []

    def prepare(self) -> None:
        """See `Target.prepare`."""
        if self.partial.exists():
            shutil.rmtree(self.partial)
        self.partial.mkdir(parents=True)

    def write_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """See `Target.write_tensors`; [...] of any shape."""
        write_tensors(self.partial / name, tensors)
        self._names.append(name)

    def write_text(self, name: str, text: str) -> None:
        """See `Target.write_text`."""
        (self.partial / name).write_text(text, encoding="utf-8")
        self._names.append(name)

    def written(self) -> dict[str, FileEntry]:
        """See `Target.written`."""
        for name in self._names:
            sync(self.partial / name)
        paths = {name: self.partial / name for name in self._names}
        return {name: {"bytes": path.stat().st_size, "sha256": sha256_file(path)} for name, path in paths.items()}

    def complete(self, files: Mapping[str, FileEntry]) -> None:
        """See `Target.complete`."""
        mark_complete(self.partial, self.final, files)


class ObjectTarget(Target):
    """Objects below the checkpoint's name; it is one once the marker, which is written last, is among them."""

    def __init__(self, final: ObjectPath, retry_s: float, report: Callable[[str], None]) -> None:
        """Prepare to write.

        Args:
            final: the checkpoint's name.
            retry_s: seconds from a first failure in which the store is tried again, while other ranks may wait: for one
                file, or for those that complete a checkpoint.
            report: told in one line when that begins.
        """
        self.final, self.retry_s, self.report = final, retry_s, report
        self._files: dict[str, FileEntry] = {}

    def prepare(self) -> None:
        """See `Target.prepare`."""
        self._patiently(lambda: remove_folder(self.final, MARKER))

    def write_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """See `Target.write_tensors`; [...] of any shape."""
        self._files[name] = self._patiently(lambda: self._upload(name, safetensors_stream(tensors), extents=True))

    def write_text(self, name: str, text: str) -> None:
        """See `Target.write_text`."""
        data = [memoryview(text.encode("utf-8"))]
        self._files[name] = self._patiently(lambda: self._upload(name, data))

    def written(self) -> dict[str, FileEntry]:
        """See `Target.written`."""
        return self._files

    def complete(self, files: Mapping[str, FileEntry]) -> None:
        """See `Target.complete`."""
        text = manifest_text(files).encode("utf-8")
        marker = hashlib.sha256(text).hexdigest() + "\n"

        def both() -> None:
            self._upload(MANIFEST, [memoryview(text)])
            self._upload(MARKER, [memoryview(marker.encode("ascii"))])

        # tried again as one: the other ranks wait for both at once, and no longer than `retry_s` allows for
        self._patiently(both)

    def _patiently(self, work: Callable[[], T]) -> T:
        """Do `work`, again and again while it fails, for `retry_s` seconds; raise the last OSError after them."""
        failing_since = None
        while True:
            self.progress += 1
            try:
                return work()
            except OSError as error:
                now = time.monotonic()
                if failing_since is None:
                    failing_since = now
                    if self.retry_s:
                        self.report(f"{_line(error)}; tried again for {self.retry_s:.0f} s, training goes on")
                if now - failing_since >= self.retry_s:
                    raise
                time.sleep(min(RETRY_S, self.retry_s))

    def _upload(self, name: str, pieces: Iterable[memoryview], extents: bool = False) -> FileEntry:
        """Write an object and check that the store has it as it was sent. Raises OSError.

        extents: give hashes of extents too.
        """
        path, sha256, md5s, size = self.final / name, hashlib.sha256(), [], 0
        hashes: list[str] = []
        with path.writing(PART_BYTES) as file:
            for part in regrouped(pieces, PART_BYTES):
                file.write(part)
                sha256.update(part)
                md5s.append(hashlib.md5(part, usedforsecurity=False))
                hashes += extent_hashes(part) if extents else []
                size += len(part)
                self.progress += len(part)
        entry: FileEntry = {"bytes": size, "sha256": sha256.hexdigest()}
        facts = path.facts()
        if facts["size"] != size:
            raise OSError(errno.EIO, f"holds {facts['size']:,} bytes, {size:,} were written", str(path))
        # S3's entity tag is the MD5 of the object, or that of its parts' MD5s, unless the bucket encrypts
        several = hashlib.md5(b"".join(part.digest() for part in md5s), usedforsecurity=False).hexdigest()
        tag = md5s[0].hexdigest() if size < PART_BYTES else f"{several}-{len(md5s)}"
        if str(facts.get("ETag", "")).strip('"') != tag and sha256_of(path) != entry["sha256"]:
            raise OSError(errno.EIO, "does not hold what was written", str(path))
        return {**entry, "extent_bytes": EXTENT_BYTES, "extents": hashes} if extents else entry


def _line(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}"
