"""A run of `megamem train` on the nodes of a cluster, before it is known how it gets there."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from launchers.config import LaunchConfig


@dataclass(frozen=True)
class Job:
    """What each target needs to know."""

    name: str
    """Of the run."""
    cluster: LaunchConfig
    processes: int
    """Ranks of a node."""
    fits: tuple[int, ...]
    """Numbers of nodes that batch and layout fit, ascending."""
    folder: Path
    """Where the job's configuration, script and logs lie, as the nodes see it."""
    work: Path
    """Working folder on this machine."""
    again: bool = True
    """Whether a run that ends with STOPPED is to be gone on with; not one that says itself where it stops."""
    then: tuple[str, ...] = ()
    """On SLURM: verb of megamem and its arguments, which one process runs once the run is done. If `result` is there
    already, nothing else is run."""
    result: Path | None = None
    """What a run that is done leaves."""

    @property
    def run_folder(self) -> Path:
        """Of the run, as the nodes see it."""
        return self.folder.parent.parent

    @property
    def config(self) -> Path:
        """The run's resolved configuration."""
        return self.folder / "config.yaml"

    @property
    def environment(self) -> dict[str, str]:
        """Variables of every process."""
        return {name: str(value) for name, value in self.cluster.environment.items()}

    def agent(self, python: str = "python") -> list[str]:
        """The command of a node, but for which node it is: see `megamem agent --help`."""
        cluster = self.cluster
        return [
            python, "-m", "megamem", "agent",
            "--nodes", ",".join(str(number) for number in self.fits),
            "--processes", str(self.processes),
            "--max-restarts", str(cluster.max_restarts),
            "--join-seconds", str(cluster.join_seconds),
            "--stop-seconds", str(cluster.stop_seconds),
        ]  # fmt: skip

    def train(self, config: Path | None = None) -> list[str]:
        """What each rank runs."""
        return ["train", str(config or self.config)]

    def label(self, longest: int = 50) -> str:
        """The run's name as clusters take names: lower case, digits and dashes."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")[:longest].rstrip("-") or "run"
