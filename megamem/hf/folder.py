"""Folders that a conversion writes: under another name first, so that they appear whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from checkpoints.folder import PARTIAL
from megamem.errors import ConversionError


def refuse_existing(out: Path) -> None:
    """Raise ConversionError if there is something at `out`."""
    if out.exists():
        raise ConversionError(f"{out}: exists already; choose another folder")


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """Give an empty folder that becomes `out` at the end, or goes if anything fails.

    Its name is its own: two conversions at once stay apart, and what others called NAME.partial is left alone.

    Raises: ConversionError where something cannot be written, or there is something at `out` by then.
    """
    partial = out.with_name(f"{out.name}.{uuid4().hex[:8]}{PARTIAL}")
    try:
        partial.mkdir(parents=True)
        yield partial
        refuse_existing(out)
        partial.rename(out)
    except OSError as error:
        raise ConversionError(f"{error.filename or out}: cannot be written ({error.strerror or error})") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
