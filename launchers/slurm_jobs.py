"""Jobs that were handed to SLURM: their numbers, kept in their folders, and where they stand."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from launchers.slurm import ENDED
from launchers.snapshot import FOLDER
from megamem.errors import STOPPED, DependencyError, MegamemError

NUMBER = "job"
"""File in the job's folder with the number that SLURM gave it."""
_OVER = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
}  # fmt: skip
_RUNNING = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED"}


@dataclass(frozen=True)
class SlurmJob:
    """One job of a run; requeued it is the same one."""

    number: str
    """That SLURM gave it. Empty if whoever handed it over was killed before that was written."""
    folder: Path
    """With its script and logs."""
    submitted: float
    """When, in seconds since 1970."""
    code: int | None
    """Exit code of its last start; None while it runs, and if it was killed."""

    @property
    def failed(self) -> bool:
        """Of a job that SLURM has done with: whether it ended otherwise than well or by a stop."""
        return self.code not in (0, STOPPED)


def slurm_jobs(run_folder: Path) -> list[SlurmJob]:
    """The jobs that a run was submitted as, oldest first."""
    return [
        SlurmJob(path.read_text(encoding="utf-8").strip(), path.parent, path.stat().st_mtime, _code(path.parent))
        for path in sorted(run_folder.glob(f"{FOLDER}/*/{NUMBER}"))
    ]


def _code(folder: Path) -> int | None:
    path = folder / ENDED
    words = path.read_text(encoding="utf-8").strip() if path.exists() else ""
    return int(words) if words.isdigit() else None


def submit(folder: Path) -> str:
    """Hand the script in `folder` to sbatch; returns what sbatch said. Raises MegamemError."""
    (folder / NUMBER).touch()
    try:
        said = call(["sbatch", str(folder / "job.sh")])
    except MegamemError:
        (folder / NUMBER).unlink()
        raise
    if (found := re.search(r"Submitted batch job (\d+)", said)) is None:
        raise MegamemError(f"sbatch {folder / 'job.sh'}: gave no job number, but {' '.join(said.split())!r}")
    (folder / NUMBER).write_text(f"{found[1]}\n", encoding="utf-8")
    return said


def in_queue(numbers: Collection[str]) -> dict[str, str]:
    """`queued` or `running` for those of the jobs that SLURM has not done with. Raises MegamemError."""
    if not numbers:
        return {}
    try:
        lines = call(["squeue", "--noheader", f"--jobs={','.join(numbers)}", "--format=%i %T"]).splitlines()
    except MegamemError as error:
        if "Invalid job id" in str(error):  # of one job that SLURM has forgotten
            return {}
        raise
    states = dict(line.split()[:2] for line in lines if line.strip())
    return {n: "running" if s in _RUNNING else "queued" for n, s in states.items() if s not in _OVER}


def call(command: Sequence[str]) -> str:
    """Standard output of a command. Raises DependencyError, MegamemError with what it said."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise DependencyError(
            f"{command[0]} is not installed here; run this where it is: {shlex.join(command)}"
        ) from None
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        raise MegamemError(f"{shlex.join(command)}: {said or f'ended with {done.returncode}'}")
    return done.stdout.strip()
