"""Runs that W&B wrote offline, uploaded with `wandb sync`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from megamem.errors import DependencyError, MegamemError, RunFolderError
from megamem.runs.folder import held

COMMAND = [sys.executable, "-m", "wandb", "sync"]
HEADER_BYTES = 7
"""Length of a .wandb file's header: the file of a run that was killed at its start has nothing else."""


def sync(runs: Sequence[Path], report: Callable[[str], None]) -> None:
    """Upload what runs have written offline; what is uploaded already is left out.

    Runs that go on are left for the next time: `wandb sync` may take what they have for all of them.

    Args:
        runs: run folders, or folders of studies.
        report: gets one line for whatever is left out.

    Raises: DependencyError without the package wandb, RunFolderError for a folder without offline runs, MegamemError
        naming what was not uploaded.
    """
    if find_spec("wandb") is None:
        raise DependencyError("megamem wandb sync: the package wandb is missing; pip install wandb")
    folders = [folder for run in runs for folder in offline_folders(run)]
    waiting = [folder for folder in folders if not _uploaded(folder)]
    report(f"{len(folders)} offline runs, {len(folders) - len(waiting)} uploaded already")
    by_run: dict[Path, list[Path]] = {}
    for folder in waiting:
        by_run.setdefault(folder.parent.parent, []).append(folder)
    failed = []
    for run, parts in by_run.items():
        if held(run / "lock"):
            report(f"{run}: goes on; left for its end")
            continue
        empty = [folder for folder in parts if not _has_records(folder)]
        for folder in empty:
            report(f"{folder}: holds no records; left out")
        # a call for each run: wandb reads all files before it uploads any, and ends with 0 if it cannot read one
        if ready := [folder for folder in parts if folder not in empty]:
            subprocess.run([*COMMAND, *map(str, ready)], check=False)
        failed += [str(folder) for folder in ready if not _uploaded(folder)]
    if failed:
        raise MegamemError(
            f"wandb sync did not upload {', '.join(failed)}; see its own messages above, and run the command again"
        )


def offline_folders(run: Path) -> list[Path]:
    """Return W&B's folders of a run, or of all runs of a study, oldest first: a run that was resumed has several.

    Raises: RunFolderError without any.
    """
    found = [folder for pattern in ("", "runs/*/") for folder in run.glob(f"{pattern}wandb/offline-run-*")]
    if not found:
        raise RunFolderError(
            f"{run}: no wandb/offline-run-* folder in it; give the folder of a run or study with "
            "logging.wandb.mode=offline"
        )
    return sorted(found, key=lambda folder: (folder.parent, folder.name))


def _uploaded(folder: Path) -> bool:
    return any(folder.glob("*.wandb.synced"))


def _has_records(folder: Path) -> bool:
    return any(file.stat().st_size > HEADER_BYTES for file in folder.glob("*.wandb"))
