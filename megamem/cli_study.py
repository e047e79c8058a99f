"""`megamem study`: families of runs from one file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from megamem.errors import STOPPED

study_app = typer.Typer(help="Families of runs: a grid in one file, run, collected, drawn.", no_args_is_help=True)
console = Console(soft_wrap=True)

StudyPath = Annotated[Path, typer.Argument(help="YAML file of the study")]
Overrides = Annotated[list[str] | None, typer.Argument(help="overrides: key=value")]


@study_app.command()
def run(study: StudyPath, overrides: Overrides = None) -> None:
    """Train and read everything that is not done yet, then write the report. Start it again to go on."""
    from megamem.study.grid import load_study, planned_runs
    from megamem.study.queue import Queue

    settings = load_study(study, tuple(overrides or ()))
    runs = planned_runs(settings)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        item = bar.add_task(settings.name, total=None)
        outcome = Queue(
            settings, bar.console.print, lambda done, total: bar.update(item, completed=done, total=total)
        ).run(runs)
    for task in outcome.failed:
        console.print(f"failed: {task.name}; see {task.log}")
    _report(study, overrides)
    if outcome.stopped:
        console.print("stopped; the same command goes on")
        raise typer.Exit(STOPPED)
    if outcome.failed:
        raise typer.Exit(1)


@study_app.command()
def report(study: StudyPath, overrides: Overrides = None) -> None:
    """Tables, laws, pictures and the page of what has finished so far."""
    _report(study, overrides)


@study_app.command("list")
def list_runs(study: StudyPath, overrides: Overrides = None) -> None:
    """The study's runs and where each stands, as JSON lines."""
    from megamem.study.grid import load_study, planned_runs
    from megamem.study.states import run_states

    settings = load_study(study, tuple(overrides or ()))
    for state in run_states(settings, planned_runs(settings)):
        where = {"state": state.state, "done": state.state == "done", "step": state.step, "failures": state.failures}
        console.file.write(json.dumps({"run": state.run.name, **state.run.labels, **where}) + "\n")


def _report(study: Path, overrides: list[str] | None) -> None:
    from megamem.study.grid import load_study
    from megamem.study.report import write_report

    text, folder = write_report(load_study(study, tuple(overrides or ())))
    console.print(text, highlight=False, markup=False)
    console.print(f"{folder}: report.html, tables.md, records.csv, .parquet and .json, pictures", highlight=False)
