"""`megamem runs`: what all runs of a folder are at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from megamem.cli.options import Json
from megamem.cli.output import console, write_json, write_line

OTHER_COLUMNS = 90
"""Characters of the table of runs besides their names."""


def runs(
    folder: Annotated[Path, typer.Argument(help="where to look; studies' runs below it are found too")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """List all runs in a folder: state, step, losses, speed. With --json one object a line."""
    from megamem.runs.status import find_runs, read_status, runs_table

    found = [read_status(path) for path in find_runs(folder)]
    if as_json:
        for run in found:
            write_json(run.to_dict())
        return
    if not found:
        write_line(f"{folder}: no runs")
        return
    # names whole, whatever the width: half a name is none
    longest = max(len(str(run.folder)) for run in found)
    width = max(console.width, longest + OTHER_COLUMNS)
    Console(width=width, markup=False, emoji=False).print(runs_table(found, folder))
