"""Folders that a conversion writes: under another name first, so that they appear whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from checkpoints.folder import PARTIAL
from megamem.errors import ConversionError


def refuse_existing(out: Path) -> None:
    """Raise ConversionError if there is something at `out`."""
    if out.exists():
        raise ConversionError(f"{out}: exists already; choose another folder")


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """Give an empty folder that becomes `out` at the end, or goes if anything fails.

    Remains of earlier attempts go too.

    Raises: ConversionError where nothing can be written.
    """
    partial = out.with_name(out.name + PARTIAL)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    except OSError as error:
        raise ConversionError(f"{out}: cannot be written ({error.strerror})") from None
    try:
        yield partial
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
