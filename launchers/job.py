"""A run of `megamem train` on the nodes of a cluster, whichever target starts them."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from launchers.config import ClusterConfig


@dataclass(frozen=True)
class Job:
    """What each target needs to know of a job."""

    name: str
    """Name of the run."""
    cluster: ClusterConfig
    processes: int
    """Ranks on each node."""
    node_counts: tuple[int, ...]
    """Numbers of nodes that batch and layout fit, ascending."""
    folder: Path
    """The folder with the job's configuration, script and logs, as the nodes see it."""
    work_folder: Path
    """The working folder of the nodes, to which relative paths of the run refer."""
    resumes: bool = True
    """Whether a run that ended with STOPPED is to be started again; false for one that says itself where it stops."""
    follow_up: tuple[str, ...] = ()
    """Verb of megamem and its arguments that one process runs once the run is done (SLURM only). If `result` exists
    already, this is all that is run."""
    result: Path | None = None
    """The file that a finished run leaves."""
    token: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    """What the nodes of this start sign with what they tell one another; see `launchers.node.Node`."""

    @property
    def run_folder(self) -> Path:
        """The run's folder, as the nodes see it."""
        return self.folder.parent.parent

    @property
    def config(self) -> Path:
        """The file of the run's resolved configuration."""
        return self.folder / "config.yaml"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of every process."""
        return {name: str(value) for name, value in self.cluster.environment.items()}

    def agent_command(self, python: str = "python") -> list[str]:
        """Return the command of a node up to the options that say which node it is; see `megamem agent --help`."""
        cluster = self.cluster
        return [
            python, "-m", "megamem", "agent",
            "--nodes", ",".join(str(number) for number in self.node_counts),
            "--processes", str(self.processes),
            "--max-restarts", str(cluster.max_restarts),
            "--join-seconds", str(cluster.join_seconds),
            "--stop-seconds", str(cluster.stop_seconds),
        ]  # fmt: skip

    def train_arguments(self, config: Path | None = None) -> list[str]:
        """Return the arguments of `megamem` that each rank runs."""
        return ["train", str(config or self.config)]

    def label(self, longest: int = 50) -> str:
        """Return the run's name as clusters take names: lower case, digits and dashes."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")[:longest].rstrip("-") or "run"
