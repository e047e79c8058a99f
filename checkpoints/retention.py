"""Retention: which checkpoints of a run stay, and the removal of the others and of what killed saves have left."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from checkpoints.folder import MARKER, NAME, PARTIAL, Checkpoint, checkpoints_in
from checkpoints.location import Location, remove_folder
from megamem.errors import CheckpointError


def steps_to_keep(
    checkpoints: Iterable[Checkpoint],
    last: int,
    every: int | None,
    best: int,
    losses: dict[int, float],
    named: Iterable[int] = (),
) -> set[int]:
    """Return the steps to keep: the `last` newest, each multiple of `every`, the `best` of lowest loss, those `named`.

    losses: validation losses by step, where there was a validation.
    """
    steps = sorted(c.step for c in checkpoints if c.complete)
    keep = set(steps[-last:]) | (set(named) & set(steps))
    keep |= {step for step in steps if every and step % every == 0}
    return keep | set(sorted((step for step in steps if step in losses), key=lambda step: losses[step])[:best])


class Pruned(NamedTuple):
    """What became of checkpoints that were not to be kept."""

    removed: list[Checkpoint]
    failed: dict[Location, str]
    """Those that could not be removed, and why."""


def prune(
    folder: Location,
    last: int,
    every: int | None = None,
    best: int = 0,
    named: Iterable[int] = (),
    newest: int | None = None,
) -> Pruned:
    """Remove complete checkpoints that are not to be kept, and remains of incomplete ones.

    The marker goes first, so that a half-removed folder is not taken for a checkpoint. One that cannot be removed keeps
    no other from going.

    Args:
        folder: holds the checkpoints of a run.
        last, every, best, named: as in `steps_to_keep`.
        newest: step of the run; later checkpoints, which were skipped because they are damaged, are left alone and do
            not count.
    """
    found = [c for c in checkpoints_in(folder, unfinished=True) if newest is None or c.step <= newest]
    losses = {c.step: loss for c in found if c.complete and (loss := _validation_loss(c)) is not None}
    keep = steps_to_keep(found, last, every, best, losses, named)
    pruned = Pruned([], {})
    for checkpoint in found:
        if checkpoint.step in keep:
            continue
        try:
            remove_folder(checkpoint.path, MARKER)
            pruned.removed.append(checkpoint)
        except OSError as error:
            pruned.failed[checkpoint.path] = error.strerror or str(error)
    return pruned


def remove_unfinished(folder: Path) -> dict[Location, str]:
    """Remove what saves that were killed have left on a disk; return what cannot be removed, and why."""
    failed: dict[Location, str] = {}
    for path in sorted(folder.glob(f"step-*{PARTIAL}")):
        if not NAME.fullmatch(path.name.removesuffix(PARTIAL)):
            continue
        try:
            remove_folder(path, MARKER)
        except OSError as error:
            failed[path] = error.strerror or str(error)
    return failed


def _validation_loss(checkpoint: Checkpoint) -> float | None:
    """Return the validation loss of a checkpoint's step, where there is one that is finite."""
    try:
        loss = checkpoint.run().get("val_loss")
    except CheckpointError:
        return None
    return float(loss) if loss is not None and math.isfinite(loss) else None
