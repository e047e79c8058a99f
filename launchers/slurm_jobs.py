"""Jobs that were submitted to SLURM: their numbers, kept in their folders, and what state they are in."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from launchers.commands import call
from launchers.snapshot import FOLDER
from megamem.errors import STOPPED, MegamemError

SCRIPT = "job.sh"
"""File in the job's folder that sbatch takes."""
NUMBER = "job"
"""File in the job's folder with the number that SLURM gave it."""
ENDED = "ended"
"""File in the job's folder with the exit code of the script's last start; none while it runs, or if it was killed."""
_OVER = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
}  # fmt: skip
_RUNNING = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED"}


@dataclass(frozen=True)
class SlurmJob:
    """One job of a run; requeued it is the same one."""

    number: str
    """The number that SLURM gave it. Empty if the process that submitted it was killed before it was written."""
    folder: Path
    """The folder with its script and logs."""
    submitted: float
    """Time of the submission in seconds since 1970."""
    code: int | None
    """Exit code of its last start; None while it runs, and if it was killed."""

    @property
    def failed(self) -> bool:
        """Whether the job, if SLURM has done with it, ended neither well nor by a stop."""
        return self.code not in (0, STOPPED)


def slurm_jobs(run_folder: Path) -> list[SlurmJob]:
    """Return the jobs that a run was submitted as, oldest first."""
    return [
        SlurmJob(path.read_text(encoding="utf-8").strip(), path.parent, path.stat().st_mtime, _code(path.parent))
        for path in sorted(run_folder.glob(f"{FOLDER}/*/{NUMBER}"))
    ]


def _code(folder: Path) -> int | None:
    """Return the exit code of the job's last start, None if it wrote none."""
    path = folder / ENDED
    words = path.read_text(encoding="utf-8").strip() if path.exists() else ""
    return int(words) if words.isdigit() else None


def submit_job(folder: Path) -> str:
    """Submit the script in `folder` with sbatch, and return what sbatch answered. Raises MegamemError."""
    (folder / NUMBER).touch()  # before the submission: a job whose number was lost must not be submitted twice
    try:
        answer = call(["sbatch", str(folder / SCRIPT)])
    except MegamemError:
        (folder / NUMBER).unlink()
        raise
    if (found := re.search(r"Submitted batch job (\d+)", answer)) is None:
        raise MegamemError(f"sbatch {folder / SCRIPT}: gave no job number, but {' '.join(answer.split())!r}")
    (folder / NUMBER).write_text(f"{found[1]}\n", encoding="utf-8")
    return answer


def in_queue(numbers: Collection[str]) -> dict[str, str]:
    """Return `queued` or `running` for each job, by number, that SLURM has not done with. Raises MegamemError."""
    if not numbers:
        return {}
    try:
        lines = call(["squeue", "--noheader", f"--jobs={','.join(numbers)}", "--format=%i %T"]).splitlines()
    except MegamemError as error:
        if "Invalid job id" in str(error):  # SLURM says so of a single job that it has forgotten
            return {}
        raise
    states = dict(line.split()[:2] for line in lines if line.strip())
    return {
        number: "running" if state in _RUNNING else "queued" for number, state in states.items() if state not in _OVER
    }
