"""`megamem status`: what one run, or a curriculum, is at."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megamem.cli.options import Json
from megamem.cli.output import console, write_json

if TYPE_CHECKING:
    from rich.console import RenderableType

    from megamem.runs.status import Condition

INTERVAL_S = 2.0
"""Seconds between two looks at a run that is watched."""


def status(
    run: Annotated[Path, typer.Argument(help="folder of a run or a curriculum")],
    as_json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", help="show it again and again until the run has ended")] = False,
) -> None:
    """Show what a run is at: state, step, speed, last checkpoint, and every rank's last action.

    Of a curriculum, a line for each lesson.
    """
    from rich.live import Live

    figures, page, condition = _look(run)
    if as_json:
        write_json(figures)
        while watch and condition in ("running", "stale", "waiting"):
            time.sleep(INTERVAL_S)
            figures, _, condition = _look(run)
            write_json(figures)
    elif not watch:
        console.print(page, highlight=False)
    else:
        with Live(page, console=console, auto_refresh=False) as live:
            while condition in ("running", "stale", "waiting"):
                time.sleep(INTERVAL_S)
                _, page, condition = _look(run)
                live.update(page, refresh=True)


def _look(folder: Path) -> tuple[dict[str, object], RenderableType, Condition]:
    """Return what a run or a curriculum is at: for JSON, to be shown, and in one word."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from megamem.evaluation.suites.result import read_suites
    from megamem.runs.status import (
        curriculum_condition,
        is_curriculum,
        lesson_statuses,
        read_status,
        run_page,
        runs_table,
    )

    figures: dict[str, object]
    if not is_curriculum(folder):
        found, suites = read_status(folder), read_suites(folder)
        page: RenderableType = run_page(found)
        if suites:
            lines = Table.grid(padding=(0, 2))
            for suite in suites:
                lines.add_row(f"suite {suite.suite}", Text(suite.line()))
            page = Group(page, lines)
        figures = {**found.to_dict(), "suites": [suite.to_dict() for suite in suites]}
        return figures, page, found.condition
    lessons = lesson_statuses(folder)
    condition = curriculum_condition(lessons)
    each = [lesson.to_dict() for lesson in lessons]
    figures = {"curriculum": str(folder), "state": condition, "lessons": each}
    return figures, runs_table(lessons, folder), condition
