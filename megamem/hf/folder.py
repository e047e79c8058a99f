"""Folders that a conversion writes: under another name first, so that they appear whole or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path

from checkpoints.folder import PARTIAL
from megamem.errors import ConversionError


def refuse_existing(out: Path) -> None:
    """Raise ConversionError if there is something at `out`."""
    if out.exists():
        raise ConversionError(f"{out}: exists already; choose another folder")


def new_partial(out: Path) -> Path:
    """An empty folder that the caller fills and renames to `out`; remains of an earlier attempt go."""
    partial = out.with_name(out.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial
