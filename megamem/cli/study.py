"""`megamem study`: families of runs from one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from megamem.cli.options import Overrides
from megamem.cli.output import console, write_json, write_line
from megamem.errors import STOPPED, ConfigError

if TYPE_CHECKING:
    from megamem.study.config import StudyConfig
    from megamem.study.grid import PlannedRun

study_app = typer.Typer(help="Families of runs: a grid in one file, run, collected, drawn.", no_args_is_help=True)

StudyPath = Annotated[Path, typer.Argument(help="YAML file of the study")]


@study_app.command()
def run(
    study: StudyPath,
    overrides: Overrides = None,
    on: Annotated[Literal["local", "slurm"], typer.Option(help="where runs are started")] = "local",
    cluster: Annotated[Path | None, typer.Option(help="YAML file of the cluster, as in configs/clusters/")] = None,
    again: Annotated[bool, typer.Option("--again", help="start what failed for good too")] = False,
) -> None:
    """Train and read everything that is not done yet, then write the report. Start it again to go on.

    With --on slurm, jobs are submitted and not waited for; overrides may be the cluster's too.
    """
    if on == "slurm":
        _submit(study, overrides or [], cluster, again)
        return
    if cluster:
        raise ConfigError("--cluster: goes with --on slurm only; leave it out")
    from megamem.study.queue import Queue

    settings, runs = _planned(study, overrides)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        item = bar.add_task(settings.name, total=None)
        moved = lambda done, total: bar.update(item, completed=done, total=total)  # noqa: E731
        outcome = Queue(settings, bar.console.print, moved, again).run(runs)
    for task in outcome.failed:
        console.print(f"failed: {task.name}; see {task.log}")
    if outcome.stopped:
        console.print("stopped; the same command goes on")
    _report(study, overrides)
    if outcome.stopped:
        raise typer.Exit(STOPPED)
    if outcome.failed:
        raise typer.Exit(1)


def _submit(study: Path, overrides: list[str], cluster: Path | None, again: bool) -> None:
    """Hand the study's runs to SLURM as jobs, then write the report of what has finished."""
    from launchers.launch import load_cluster
    from megamem.study.submit import submit_runs

    nodes, ours = load_cluster(overrides, cluster)
    settings, runs = _planned(study, ours)
    found = submit_runs(settings, runs, nodes, lambda text: console.print(text, highlight=False), again)
    for state in found.failed:
        write_line(f"failed: {state.run.name}: {'; '.join(state.failures)}")
    console.print(
        f"{len(found.submitted)} submitted; `megamem study list` says how it stands, the same command goes on"
    )
    if found.failed:
        console.print(f"{len(found.failed)} failed for good; --again submits them too", highlight=False)
    _report(study, ours)
    if found.failed:
        raise typer.Exit(1)


@study_app.command()
def read(folder: Annotated[Path, typer.Argument(help="folder of the job")]) -> None:
    """Read a model after its training on SLURM. Jobs of `megamem study run --on slurm` call it."""
    from megamem.study.submit import read_here

    raise typer.Exit(read_here(folder))


@study_app.command()
def report(study: StudyPath, overrides: Overrides = None) -> None:
    """Write tables, laws, pictures and the page of what has finished so far."""
    _report(study, overrides)


@study_app.command("list")
def list_runs(study: StudyPath, overrides: Overrides = None) -> None:
    """List the study's runs and where each stands, as JSON lines."""
    from megamem.study.grid import load_study, planned_runs
    from megamem.study.states import run_states

    settings = load_study(study, tuple(overrides or ()))
    for state in run_states(settings, planned_runs(settings)):
        where = {"state": state.state, "done": state.complete, "step": state.step, "failures": state.failures}
        where |= {"readings": dict(zip(("done", "of"), state.readings, strict=True))}
        where |= {"job": state.jobs[-1].number} if state.jobs else {}
        write_json({"run": state.run.name, **state.run.labels, **where})


def _planned(study: Path, overrides: list[str] | None) -> tuple[StudyConfig, list[PlannedRun]]:
    """Return the study and its runs, both checked."""
    from megamem.study.grid import load_study, planned_runs
    from megamem.study.tables import places

    settings = load_study(study, tuple(overrides or ()))
    runs = planned_runs(settings)
    for table in settings.tables:
        places(settings, table, runs)
    return settings, runs


def _report(study: Path, overrides: list[str] | None) -> None:
    """Write the report and print its text."""
    from megamem.study.grid import load_study
    from megamem.study.report import write_report

    text, folder = write_report(load_study(study, tuple(overrides or ())))
    write_line(text)
    console.print(f"{folder}: report.html, tables.md, records.csv, .parquet and .json, pictures", highlight=False)
