"""What verbs read and write with: text files, the console, JSON lines, tables of facts and progress bars."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from megamem.errors import DataError

console = Console(soft_wrap=True, markup=False, emoji=False)
"""Standard output. Brackets and colons are printed as they are: paths may hold them."""


def read_text(path: Path) -> str:
    """Return a file's text. Raises DataError where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from None


def write_json(value: object, indent: int | None = None) -> None:
    """Write a value as JSON, without an indent in one line."""
    console.file.write(json.dumps(value, indent=indent) + "\n")
    console.file.flush()


def write_line(text: str) -> None:
    """Write one line as it is, without colors."""
    console.print(text, highlight=False)


def print_facts(facts: Iterable[tuple[str, object]]) -> None:
    """Print names and values as a table; long values are folded, not cut."""
    table = Table(show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(name, str(value))
    console.print(table)


@contextmanager
def progress_bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar over `total` bytes, and give the function that advances it."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task(label, total=total)
        yield lambda done: progress.advance(task, done)
