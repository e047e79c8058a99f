"""The checkpoint that a path given by a person means: a checkpoint itself, or the newest of a run."""

from __future__ import annotations

from pathlib import Path

from checkpoints.folder import FOLDER, Checkpoint, checkpoints_in, open_checkpoint
from megamem.errors import CheckpointError


def checkpoints_folder(path: Path) -> Path:
    """Return the folder that holds a run's checkpoints, for a run folder or that folder. Raises CheckpointError."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder")
    return path / FOLDER if (path / FOLDER).is_dir() else path


def find_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint at `path`, or the newest complete one of the run folder there. Raises CheckpointError."""
    if path.name.startswith("step-"):
        return open_checkpoint(path)
    found = [checkpoint for checkpoint in checkpoints_in(checkpoints_folder(path)) if checkpoint.complete]
    if not found:
        raise CheckpointError(f"{path}: no complete checkpoint in it")
    return found[-1]
