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
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="start what failed for good too")] = False,
) -> None:
    """Train and evaluate everything that is not done yet, then write the report. Start it again to go on.

    With --on slurm, jobs are submitted and not waited for; overrides may be the cluster's too.
    """
    if on == "slurm":
        _submit(study, overrides or [], cluster, retry_failed)
        return
    if cluster:
        raise ConfigError("--cluster: goes with --on slurm only; leave it out")
    from megamem.study.queue import Queue

    settings, runs = _planned(study, overrides)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        item = bar.add_task(settings.name, total=None)
        progress = lambda done, total: bar.update(item, completed=done, total=total)  # noqa: E731
        outcome = Queue(settings, write_line, progress, retry_failed).run(runs)  # above the bar, on the same console
    for task in outcome.failed:
        write_line(f"failed: {task.name}; see {task.log}")
    if outcome.stopped:
        console.print("stopped; the same command goes on")
    _report(study, overrides)
    if outcome.stopped:
        raise typer.Exit(STOPPED)
    if outcome.failed:
        raise typer.Exit(1)


def _submit(study: Path, overrides: list[str], cluster: Path | None, retry_failed: bool) -> None:
    """Hand the study's runs to SLURM as jobs, then write the report of what has finished."""
    from launchers.launch import load_cluster
    from megamem.study.submit import submit_runs

    nodes, ours = load_cluster(overrides, cluster)
    settings, runs = _planned(study, ours)
    found = submit_runs(settings, runs, nodes, write_line, retry_failed)
    for state in found.failed:
        write_line(f"failed: {state.run.name}: {'; '.join(state.failures)}")
    console.print(
        f"{len(found.submitted)} submitted; `megamem study list` shows their states, the same command goes on"
    )
    if found.failed:
        console.print(f"{len(found.failed)} failed for good; --retry-failed submits them too", highlight=False)
    _report(study, ours)
    if found.failed:
        raise typer.Exit(1)


@study_app.command()
def evaluate(folder: Annotated[Path, typer.Argument(help="folder of the job")]) -> None:
    """Make the evaluations after a training on SLURM. Jobs of `megamem study run --on slurm` call it."""
    from megamem.study.submit import evaluate_here

    raise typer.Exit(evaluate_here(folder))


@study_app.command()
def report(study: StudyPath, overrides: Overrides = None) -> None:
    """Write tables, laws, pictures and the page of what has finished so far."""
    _report(study, overrides)


@study_app.command("list")
def list_runs(study: StudyPath, overrides: Overrides = None) -> None:
    """List the study's runs and the state of each, as JSON lines."""
    from megamem.study.grid import load_study, planned_runs
    from megamem.study.status import run_statuses

    settings = load_study(study, tuple(overrides or ()))
    for status in run_statuses(settings, planned_runs(settings)):
        fields = {"state": status.state, "done": status.complete, "step": status.step, "failures": status.failures}
        fields |= {"evaluations": dict(zip(("done", "of"), status.evaluations, strict=True))}
        fields |= {"job": status.jobs[-1].number} if status.jobs else {}
        write_json({"run": status.run.name, **status.run.labels, **fields})


def _planned(study: Path, overrides: list[str] | None) -> tuple[StudyConfig, list[PlannedRun]]:
    """Return the study and its runs, both checked."""
    from megamem.study.collect import check_recovered
    from megamem.study.grid import load_study, planned_runs
    from megamem.study.tables import places

    settings = load_study(study, tuple(overrides or ()))
    runs = planned_runs(settings)
    for table in settings.tables:
        places(settings, table, runs)
    check_recovered(settings.recovered, runs)
    return settings, runs


def _report(study: Path, overrides: list[str] | None) -> None:
    """Write the report and print its text."""
    from megamem.study.grid import load_study
    from megamem.study.report import write_report

    text, folder = write_report(load_study(study, tuple(overrides or ())))
    write_line(text)
    write_line(f"{folder}: report.html, tables.md, records.csv, .parquet and .json, pictures")
