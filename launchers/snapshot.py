"""The record of a job, written before it starts: enough to say later what ran, with which code, and to repeat it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import distributions, version
from pathlib import Path

from launchers.config import looks_secret
from megamem.errors import RunFolderError

PREFIXES = ("NCCL_", "CUDA_", "GLOO_", "TORCH_", "SLURM_", "OMP_", "MEGAMEM_")
"""Environment variables that are written down; not those whose names say secret."""

FOLDER = "launch"
"""The folder in a run folder that has a folder for each start."""


def snapshot_folder(run_folder: Path) -> Path:
    """Return the folder for a job that starts now, `launch/<UTC time>`, which is not made yet."""
    return run_folder / FOLDER / time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())


def write_snapshot(folder: Path, files: Mapping[str, str], private: Sequence[str] = ()) -> None:
    """Make `folder` with `files`, the code's version, packages and environment. Raises RunFolderError.

    private: names of those that only their owner may read.
    """
    try:
        folder.mkdir(parents=True)
        (folder / "snapshot.json").write_text(json.dumps(facts(), indent=2) + "\n", encoding="utf-8")
        (folder / "packages.txt").write_text("\n".join(packages()) + "\n", encoding="utf-8")
        if (diff := _git("diff", "HEAD")) is not None and diff.strip():
            (folder / "changes.diff").write_text(diff, encoding="utf-8")
        for name, text in files.items():
            (folder / name).touch(0o600 if name in private else 0o666)
            (folder / name).write_text(text, encoding="utf-8")
    except FileExistsError:
        raise RunFolderError(f"{folder}: another launch of this run began in the same second; try again") from None
    except OSError as error:
        raise RunFolderError(f"{folder}: cannot be written ({error.strerror}); choose another `runs_folder`") from None


def facts() -> dict[str, object]:
    """Return command, code version, machine and environment."""
    revision, status = _git("rev-parse", "HEAD"), _git("status", "--porcelain")
    return {
        "command": sys.argv,
        "work": str(Path.cwd()),
        "megamem": version("megamem"),
        "revision": revision.strip() if revision else None,
        "changed": status.splitlines() if status is not None else None,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "environment": environment(os.environ),
    }


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that begin with one of `PREFIXES` and are no secrets."""
    return {
        name: value for name, value in sorted(variables.items()) if name.startswith(PREFIXES) and not looks_secret(name)
    }


@cache
def packages() -> tuple[str, ...]:
    """Return every installed distribution as `name==version`."""
    found = {(dist.metadata["Name"], dist.version) for dist in distributions()}
    return tuple(f"{name}=={number}" for name, number in sorted(found, key=lambda item: str(item[0]).lower()))


def _git(*arguments: str) -> str | None:
    """Return git's output for the folder of the code; None where it is not under git."""
    try:
        done = subprocess.run(
            ["git", *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            cwd=Path(__file__).parent,
        )
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None
