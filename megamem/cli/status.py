"""`megamem status` and `megamem runs`: what runs are at."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

console = Console(soft_wrap=True)

Json = Annotated[bool, typer.Option("--json", help="machine-readable")]
EVERY_S = 2.0
"""Of a watched run."""
OTHER_COLUMNS = 90
"""Characters of a table of runs besides their names."""


def status(
    run: Annotated[Path, typer.Argument(help="run folder")],
    as_json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", help="show it again and again until the run has ended")] = False,
) -> None:
    """What a run is at: state, step, speed, last checkpoint, and every rank's last action."""
    from rich.live import Live

    from megamem.runs.status import read_status, run_page

    found = read_status(run)
    if as_json:
        console.file.write(json.dumps(found.to_dict()) + "\n")
        while watch and found.condition in ("running", "stale"):
            time.sleep(EVERY_S)
            found = read_status(run)
            console.file.write(json.dumps(found.to_dict()) + "\n")
            console.file.flush()
    elif not watch:
        console.print(run_page(found), highlight=False)
    else:
        with Live(run_page(found), console=console, auto_refresh=False) as live:
            while found.condition in ("running", "stale"):
                time.sleep(EVERY_S)
                found = read_status(run)
                live.update(run_page(found), refresh=True)


def runs(
    folder: Annotated[Path, typer.Argument(help="where to look; studies' runs below it are found too")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """A table of all runs in a folder: state, step, losses, speed. With --json one object a line."""
    from megamem.runs.status import find_runs, read_status, runs_table

    found = [read_status(path) for path in find_runs(folder)]
    if as_json:
        for run in found:
            console.file.write(json.dumps(run.to_dict()) + "\n")
        return
    if not found:
        console.print(f"{folder}: no runs", highlight=False)
        return
    # names whole, whatever the width: half a name is none
    longest = max(len(str(run.folder)) for run in found)
    Console(width=max(console.width, longest + OTHER_COLUMNS)).print(runs_table(found, folder))
