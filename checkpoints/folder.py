"""Folders of checkpoints: which are complete, what is in them, whether it is still what was written.

    checkpoints/step-00000020/     a checkpoint
        rank-00000.safetensors     one file per writing rank
        index.json                 which tensor lies where
        run.json                   counters, configuration, fingerprint of the data
        manifest.json              size and SHA-256 of each of these
        COMPLETE                   SHA-256 of the manifest; without it the folder does not exist for readers

A checkpoint is written under a name ending in .partial, hashed from disk, marked, and then renamed. The latest one is
found by looking, never by a pointer that could be wrong.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from megamem.errors import CheckpointError
from megamem.files import sha256_file

FOLDER = "checkpoints"
"""Where a run folder has them."""
MANIFEST, MARKER, RUN, PARTIAL = "manifest.json", "COMPLETE", "run.json", ".partial"
_NAME = re.compile(r"step-(\d{8,})")


class RunIdentity(TypedDict):
    """What makes two parts of training one run."""

    model: dict[str, Any]
    """The model's configuration, without fields that may change between two parts."""
    data_fingerprint: str
    tokenizer_sha256: str | None
    batch_tokens: int
    sequence_length: int


class RunFacts(RunIdentity):
    """What all checkpoints of a run say of it."""

    config: dict[str, Any]
    """The resolved configuration."""
    megamem: str
    """Version that wrote it."""


class BadStepCounts(TypedDict):
    """Steps that were skipped for values that were not finite."""

    total: int
    """Skipped steps since the run began."""
    streak: list[int]
    """Numbers of the skipped steps that directly precede the checkpoint."""


class SavedRun(RunFacts):
    """The contents of run.json."""

    step: int
    """Finished optimizer steps."""
    tokens: int
    """Tokens read so far."""
    samples: int
    """Sequences read so far."""
    optimizer_steps: int
    """Updates that the optimizer has made (skipped steps are none)."""
    bad_steps: BadStepCounts
    val_loss: float | None
    """Loss of the validation at this step, if there was one."""
    layout: dict[str, int]
    """Sizes of pipeline, data and tensor parallelism: `pp`, `dp`, `tp`."""
    placement: list[int]
    """Number of layers of each stage."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder named like a checkpoint."""

    path: Path
    step: int
    """Finished optimizer steps."""

    @property
    def complete(self) -> bool:
        """True where it was written to its end. Says nothing about what happened to it since; see `verify`."""
        return (self.path / MARKER).is_file()

    def run(self) -> SavedRun:
        """Read counters, configuration and fingerprints. Raises CheckpointError naming the file."""
        saved: SavedRun = read_json(self.path / RUN)  # type: ignore[assignment]  # as a checkpoint writes it
        return saved

    def manifest(self) -> dict[str, Any]:
        """Sizes and hashes by file name. Raises CheckpointError."""
        return read_json(self.path / MANIFEST)

    @property
    def bytes(self) -> int:
        """On disk."""
        return sum(path.stat().st_size for path in self.path.iterdir() if path.is_file())


def folder_name(step: int) -> str:
    """Of a checkpoint after `step` optimizer steps."""
    return f"step-{step:08d}"


def checkpoints_in(folder: Path) -> list[Checkpoint]:
    """All folders named like checkpoints, complete or not, by step."""
    if not folder.is_dir():
        return []
    found = [(path, match) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name)) and path.is_dir()]
    return sorted((Checkpoint(path, int(match[1])) for path, match in found), key=lambda c: c.step)


def at(path: Path) -> Checkpoint:
    """The checkpoint at `path`. Raises CheckpointError if there is none."""
    match = _NAME.fullmatch(path.name)
    if not path.is_dir() or match is None:
        raise CheckpointError(f"{path}: no checkpoint (a folder called {folder_name(0)[:5]}NNNNNNNN)")
    return Checkpoint(path, int(match[1]))


def begun_from(folder: Path, start: str) -> bool:
    """Whether the newest complete checkpoint in `folder` is of a run whose `checkpoint.resume` was `start`.

    Such a run, started again by the same command, goes on from its own checkpoints. Raises: CheckpointError.
    """
    own = [c for c in checkpoints_in(folder) if c.complete]
    return bool(own) and own[-1].run()["config"]["checkpoint"]["resume"] == start


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises CheckpointError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: is missing") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: does not hold what it should")
    return value


def verify(checkpoint: Checkpoint) -> None:
    """Check every file against the manifest. Raises CheckpointError naming the first that is not as it was written."""
    try:
        _verify(checkpoint)
    except OSError as error:
        raise CheckpointError(f"{error.filename or checkpoint.path}: cannot be read ({error.strerror})") from None


def _verify(checkpoint: Checkpoint) -> None:
    path = checkpoint.path
    if not checkpoint.complete:
        raise CheckpointError(f"{path}: was not written to its end ({MARKER} is missing)")
    manifest = checkpoint.manifest()
    if (path / MARKER).read_text(encoding="utf-8").strip() != sha256_file(path / MANIFEST):
        raise CheckpointError(f"{path / MANIFEST}: is not the manifest this checkpoint was completed with")
    files = manifest["files"]
    known = {MANIFEST, MARKER, *files}
    if foreign := sorted(entry.name for entry in path.iterdir() if entry.name not in known):
        raise CheckpointError(f"{path / foreign[0]}: does not belong to this checkpoint")
    for name, entry in sorted(files.items()):
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file}: is missing")
        if file.stat().st_size != entry["bytes"]:
            raise CheckpointError(f"{file}: has {file.stat().st_size:,} bytes, {entry['bytes']:,} were written")
        if sha256_file(file) != entry["sha256"]:
            raise CheckpointError(f"{file}: is damaged (its SHA-256 is not that of the manifest)")


def sync(path: Path) -> None:
    """Force a file's or folder's content to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a small file and force it to the disk."""
    path.write_text(text, encoding="utf-8")
    sync(path)


def complete(partial: Path, final: Path, files: dict[str, dict[str, Any]]) -> None:
    """Write manifest and marker and give the folder its final name, which makes it a checkpoint at once.

    All other files must be on the disk.
    """
    manifest = partial / MANIFEST
    write_text(manifest, json.dumps({"format": 1, "files": files}, indent=1) + "\n")
    write_text(partial / MARKER, sha256_file(manifest) + "\n")
    sync(partial)
    if final.exists():  # of an earlier attempt that never got its marker, or that is being repeated
        shutil.rmtree(final)
    partial.rename(final)
    sync(final.parent)


def kept(
    checkpoints: Iterable[Checkpoint], last: int, every: int | None, best: int, scores: dict[int, float]
) -> set[int]:
    """Steps to keep: the `last` newest, each multiple of `every`, and the `best` of lowest score (loss)."""
    steps = sorted(c.step for c in checkpoints if c.complete)
    keep = set(steps[-last:])
    keep |= {step for step in steps if every and step % every == 0}
    return keep | set(sorted((step for step in steps if step in scores), key=lambda step: scores[step])[:best])


def prune(
    folder: Path, last: int, every: int | None = None, best: int = 0, newest: int | None = None
) -> list[Checkpoint]:
    """Remove complete checkpoints that are not to be kept, and remains of incomplete ones; returns the removed.

    The marker goes first, so that a half-removed folder is not taken for a checkpoint.

    newest: step of the run; later checkpoints, which were skipped because they are damaged, are left alone and do not
        count.
    """
    found = [c for c in checkpoints_in(folder) if newest is None or c.step <= newest]
    scores = {c.step: score for c in found if c.complete and (score := _score(c)) is not None}
    keep = kept(found, last, every, best, scores)
    removed = [c for c in found if c.step not in keep]
    for checkpoint in removed:
        (checkpoint.path / MARKER).unlink(missing_ok=True)
        shutil.rmtree(checkpoint.path)
    return removed


def _score(checkpoint: Checkpoint) -> float | None:
    try:
        score = checkpoint.run().get("val_loss")
    except CheckpointError:
        return None
    return float(score) if score is not None and math.isfinite(score) else None
