"""`megamem status`: what one run is at."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from megamem.cli.options import Json
from megamem.cli.output import console, write_json

INTERVAL_S = 2.0
"""Seconds between two looks at a run that is watched."""


def status(
    run: Annotated[Path, typer.Argument(help="run folder")],
    as_json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", help="show it again and again until the run has ended")] = False,
) -> None:
    """Show what a run is at: state, step, speed, last checkpoint, and every rank's last action."""
    from rich.live import Live

    from megamem.runs.status import read_status, run_page

    found = read_status(run)
    if as_json:
        write_json(found.to_dict())
        while watch and found.condition in ("running", "stale"):
            time.sleep(INTERVAL_S)
            found = read_status(run)
            write_json(found.to_dict())
    elif not watch:
        console.print(run_page(found), highlight=False)
    else:
        with Live(run_page(found), console=console, auto_refresh=False) as live:
            while found.condition in ("running", "stale"):
                time.sleep(INTERVAL_S)
                found = read_status(run)
                live.update(run_page(found), refresh=True)
