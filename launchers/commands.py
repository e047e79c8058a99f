"""Commands of a scheduler, such as sbatch or kubectl, called on this machine."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence

from megamem.errors import DependencyError, MegamemError


def call(command: Sequence[str]) -> str:
    """Run a command and return its standard output.

    Raises: DependencyError if it is not installed, MegamemError with its own message if it fails.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise DependencyError(
            f"{command[0]} is not installed here; run this where it is: {shlex.join(command)}"
        ) from None
    if done.returncode:
        message = " ".join((done.stderr or done.stdout).split())
        raise MegamemError(f"{shlex.join(command)}: {message or f'ended with {done.returncode}'}")
    return done.stdout.strip()


def call_if(submit: bool, command: Sequence[str]) -> str:
    """Return what a scheduler answers to `command`, or, if not `submit`, the line that says how to start the job.

    Raises: see `call`.
    """
    return call(command) if submit else how_to_start(command)


def how_to_start(command: Sequence[str]) -> str:
    """Return the line that says how to start a job that was written and not submitted."""
    return f"to start it: {shlex.join(command)}, or megamem launch ... --submit"
