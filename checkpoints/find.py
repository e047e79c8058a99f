"""The checkpoint that a path or URL given by a person means: a checkpoint itself, or the newest of a run."""

from __future__ import annotations

from checkpoints.folder import Checkpoint, checkpoints_in, open_checkpoint
from checkpoints.location import FOLDER, Location, ObjectPath, location, recorded_checkpoints
from megamem.errors import CheckpointError


def is_checkpoint(path: str | Location) -> bool:
    """Return whether a path or URL names one checkpoint, rather than a folder of several."""
    return location(path).name.startswith("step-")


def checkpoints_folder(path: str | Location) -> Location:
    """Return the folder that holds a run's checkpoints, for a run folder or that folder. Raises CheckpointError."""
    folder = location(path)
    if isinstance(folder, ObjectPath):
        return folder
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    if (folder / "config.yaml").is_file():
        return recorded_checkpoints(folder)
    return folder / FOLDER if (folder / FOLDER).is_dir() else folder


def find_checkpoint(path: str | Location) -> Checkpoint:
    """Return the checkpoint at `path`, or the newest complete one of the run folder there. Raises CheckpointError."""
    if is_checkpoint(path):
        return open_checkpoint(path)
    found = [checkpoint for checkpoint in checkpoints_in(checkpoints_folder(path)) if checkpoint.complete]
    if not found:
        raise CheckpointError(f"{path}: no complete checkpoint in it")
    return found[-1]
