"""`megamem wandb`: offline runs to Weights & Biases."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from megamem.errors import DependencyError, MegamemError, RunFolderError

wandb_app = typer.Typer(help="Offline runs to Weights & Biases.", no_args_is_help=True)
console = Console(soft_wrap=True)
COMMAND = [sys.executable, "-m", "wandb", "sync"]


@wandb_app.callback()
def _group() -> None:
    """Keeps `sync` a verb of its own."""


@wandb_app.command()
def sync(
    runs: Annotated[list[Path], typer.Argument(help="run folders, or folders of studies", metavar="RUN...")],
) -> None:
    """Upload what runs have written offline, with `wandb sync`; what is uploaded already is left out."""
    if find_spec("wandb") is None:
        raise DependencyError("megamem wandb sync: the package wandb is missing; pip install wandb")
    folders = [folder for run in runs for folder in offline_folders(run)]
    waiting = [folder for folder in folders if not any(folder.glob("*.wandb.synced"))]
    console.print(f"{len(folders)} offline runs, {len(folders) - len(waiting)} uploaded already", highlight=False)
    if not waiting:
        return
    code = subprocess.run([*COMMAND, *map(str, waiting)], check=False).returncode
    if code:
        raise MegamemError(f"wandb sync ended with {code}; what it could not upload stays, run the command again")


def offline_folders(run: Path) -> list[Path]:
    """W&B's folders of a run, or of all runs of a study, oldest first: a run that was resumed has several.

    Raises: RunFolderError without any.
    """
    found = [folder for pattern in ("", "runs/*/") for folder in run.glob(f"{pattern}wandb/offline-run-*")]
    if not found:
        raise RunFolderError(
            f"{run}: no wandb/offline-run-* folder in it; give the folder of a run or study with "
            "logging.wandb.mode=offline"
        )
    return sorted(found, key=lambda folder: (folder.parent, folder.name))
