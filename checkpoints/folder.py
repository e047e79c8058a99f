"""The folders of checkpoints: which are complete, what is in them, how they get their names.

    checkpoints/step-00000020/     a checkpoint
        rank-00000.safetensors     one file per writing rank
        index.json                 which tensor lies where
        run.json                   counters, configuration, fingerprint of the data
        manifest.json              size and SHA-256 of each of these
        COMPLETE                   SHA-256 of the manifest; without it the folder does not exist for readers

On a disk, a checkpoint is written under a name ending in .partial, hashed from disk, marked, and then renamed. In an
object store, which renames nothing, the marker is the object that is written last. The latest one is found by looking,
never by a pointer that could be wrong.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from checkpoints.location import Location, ObjectPath, entries, location, remove_folder
from checkpoints.records import FORMAT, FileEntry, Manifest, SavedRun, read_manifest, read_run
from megamem.errors import CheckpointError
from megamem.files import sha256_file, sync

MANIFEST, MARKER, RUN, PARTIAL = "manifest.json", "COMPLETE", "run.json", ".partial"
"""Names of files in a checkpoint, and what the name of an unfinished one ends in."""
NAME = re.compile(r"step-(\d{8,})")
"""Names of checkpoints; the group is the step."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder named like a checkpoint."""

    path: Location
    step: int
    """Finished optimizer steps."""

    @property
    def complete(self) -> bool:
        """True where it was written to its end. Says nothing about what happened to it since; see `verify`.

        Raises CheckpointError where a store does not answer.
        """
        try:
            return (self.path / MARKER).is_file()
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read ({error.strerror})") from None

    def run(self) -> SavedRun:
        """Read counters, configuration and fingerprints. Raises CheckpointError naming the file."""
        return read_run(self.path / RUN)

    def manifest(self) -> Manifest:
        """Read sizes and hashes by file name. Raises CheckpointError naming the file."""
        return read_manifest(self.path / MANIFEST)

    @property
    def bytes(self) -> int:
        """Bytes of all files together."""
        return sum(size or 0 for size in entries(self.path).values())


def folder_name(step: int) -> str:
    """Return the name of a checkpoint after `step` optimizer steps."""
    return f"step-{step:08d}"


def checkpoints_in(folder: Location, unfinished: bool = False) -> list[Checkpoint]:
    """Return what is named like a checkpoint, by step. Raises CheckpointError where a store does not answer.

    On a disk a save under way has another name. In an object store it does not, and what has no marker is left out.

    unfinished: with those, too.
    """
    try:
        names = [name for name, size in entries(folder).items() if size is None]
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be listed ({error.strerror})") from None
    found = [(name, match) for name in names if (match := NAME.fullmatch(name))]
    checkpoints = sorted((Checkpoint(folder / name, int(match[1])) for name, match in found), key=lambda c: c.step)
    if isinstance(folder, ObjectPath) and not unfinished:
        return [checkpoint for checkpoint in checkpoints if checkpoint.complete]
    return checkpoints


def open_checkpoint(path: str | Location) -> Checkpoint:
    """Return the checkpoint at a path or URL. Raises CheckpointError if there is none."""
    folder = location(path)
    match = NAME.fullmatch(folder.name)
    try:
        found = match is not None and folder.is_dir()
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be listed ({error.strerror})") from None
    if match is None or not found:
        raise CheckpointError(f"{folder}: no checkpoint (a folder called {folder_name(0)[:5]}NNNNNNNN)")
    return Checkpoint(folder, int(match[1]))


def begun_from(folder: Location, start: str) -> bool:
    """Return whether the newest complete checkpoint in `folder` is of a run whose `checkpoint.resume` was `start`.

    Such a run, started again by the same command, resumes from its own checkpoints.

    Raises:
        CheckpointError: that checkpoint cannot be read.
    """
    own = [c for c in checkpoints_in(folder) if c.complete]
    return bool(own) and own[-1].run()["config"]["checkpoint"]["resume"] == start


def write_text(path: Path, text: str) -> None:
    """Write a small file and force it to the disk."""
    path.write_text(text, encoding="utf-8")
    sync(path)


def manifest_text(files: Mapping[str, FileEntry]) -> str:
    """Return the contents of manifest.json. files: size and hash of each file."""
    return json.dumps({"format": FORMAT, "files": files}, indent=1) + "\n"


def mark_complete(partial: Path, final: Path, files: Mapping[str, FileEntry]) -> None:
    """Write manifest and marker and give the folder its final name, which makes it a checkpoint at once.

    Args:
        partial: the folder as it was written; all other files must be on the disk.
        final: its name as a checkpoint.
        files: size and hash of each file, for the manifest.
    """
    manifest = partial / MANIFEST
    write_text(manifest, manifest_text(files))
    write_text(partial / MARKER, sha256_file(manifest) + "\n")
    sync(partial)
    # an earlier attempt that never got its marker, or a checkpoint that is being written again
    if final.exists():
        remove_folder(final, MARKER)
    partial.rename(final)
    sync(final.parent)


def share(checkpoint: Checkpoint, folder: Location) -> Checkpoint:
    """Put a checkpoint into another folder of checkpoints and return it as it lies there.

    Its files are linked where both lie on one file system, which takes no room, else copied; an object store copies
    them itself. They are never written again, and stay there when the original is removed.

    Raises:
        CheckpointError: only one of the two lies in an object store, or that cannot copy.
    """
    if isinstance(folder, Path) and isinstance(checkpoint.path, Path):
        return Checkpoint(_linked(checkpoint.path, folder), checkpoint.step)
    if isinstance(folder, Path) or isinstance(checkpoint.path, Path):
        raise CheckpointError(f"{folder}: is not where {checkpoint.path} lies; leave checkpoint.folder as it was")
    final = folder / checkpoint.path.name
    try:
        # the marker last, as it is written
        for name in sorted(checkpoint.path.entries(), key=lambda name: name == MARKER):
            (checkpoint.path / name).copy_to(final / name)
    except OSError as error:
        raise CheckpointError(f"{error.filename}: cannot be copied to {final} ({error.strerror})") from None
    return Checkpoint(final, checkpoint.step)


def _linked(checkpoint: Path, folder: Path) -> Path:
    """See `share`; return the folder of the files in their new place."""
    final = folder / checkpoint.name
    partial = final.with_name(final.name + PARTIAL)
    partial.mkdir(parents=True)
    for file in checkpoint.iterdir():
        try:
            os.link(file, partial / file.name)
        except OSError:
            shutil.copyfile(file, partial / file.name)
            sync(partial / file.name)
    sync(partial)
    partial.rename(final)
    sync(folder)
    return final
