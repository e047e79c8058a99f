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
HEADER_BYTES = 7
"""Of a .wandb file: that of a run that was killed at its start has nothing else."""


@wandb_app.callback()
def _group() -> None:
    """Keeps `sync` a verb of its own."""


@wandb_app.command()
def sync(
    runs: Annotated[list[Path], typer.Argument(help="run folders, or folders of studies", metavar="RUN...")],
) -> None:
    """Upload what runs have written offline, with `wandb sync`; what is uploaded already is left out.

    Runs that go on are left for the next time: `wandb sync` may take what they have for all of them.
    """
    from megamem.runs.folder import held

    if find_spec("wandb") is None:
        raise DependencyError("megamem wandb sync: the package wandb is missing; pip install wandb")
    folders = [folder for run in runs for folder in offline_folders(run)]
    rest = [folder for folder in folders if not _uploaded(folder)]
    console.print(f"{len(folders)} offline runs, {len(folders) - len(rest)} uploaded already", highlight=False)
    parts: dict[Path, list[Path]] = {}
    for folder in rest:
        parts.setdefault(folder.parent.parent, []).append(folder)
    left = []
    for run, these in parts.items():
        if held(run / "lock"):
            console.print(f"{run}: goes on; left for its end", highlight=False)
            continue
        empty = [folder for folder in these if not _has_records(folder)]
        for folder in empty:
            console.print(f"{folder}: holds no records; left out", highlight=False)
        # a call for each run: wandb reads all files before it uploads any, and ends with 0 if it cannot read one
        if ready := [str(folder) for folder in these if folder not in empty]:
            subprocess.run([*COMMAND, *ready], check=False)
        left += [folder for folder in ready if not _uploaded(Path(folder))]
    if left:
        raise MegamemError(f"wandb sync did not upload {', '.join(left)}; see what it said, and run the command again")


def _uploaded(folder: Path) -> bool:
    return any(folder.glob("*.wandb.synced"))


def _has_records(folder: Path) -> bool:
    return any(file.stat().st_size > HEADER_BYTES for file in folder.glob("*.wandb"))


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
