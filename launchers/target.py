"""The targets of `megamem launch`: what each one is, and the registry of all.

A target is one file in `launchers/targets/` with a subclass of `Target`. Its fields are the section of the cluster's
file that has its name; its methods check a job, write what starts it and start it. Targets of other packages register
through the entry-point group `megamem.targets`, whose entries name modules to import.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import ClassVar, TypeVar

from pydantic import create_model

from launchers import targets
from launchers.config import ClusterConfig
from launchers.job import Job
from megamem.config.base import ConfigModel
from megamem.config.registry import import_all
from megamem.config.run import RunConfig
from megamem.errors import ConfigError

Report = Callable[[str], None]
"""Takes a line for the user."""


class Target(ConfigModel, ABC):
    """A place where a job can run: its settings, what it checks, what it writes and how it starts the nodes."""

    name: ClassVar[str]
    """What `--on` and the section of the cluster's file are called."""
    restarts_stopped_jobs: ClassVar[bool] = False
    """Whether it starts a job again that was stopped by a signal, at a time limit or by an eviction."""

    def check(self, cluster: ClusterConfig) -> None:
        """Check the settings, before anything is written. Raises ConfigError."""

    def check_machine(self, config: RunConfig, processes: int) -> None:
        """Check on this machine what holds on the nodes too, such as data and run folder. Raises MegamemError.

        processes: ranks of the whole job. Nothing is checked where the nodes have file systems of their own.
        """

    def place(self, config: RunConfig, folder: Path) -> tuple[Path, Path]:
        """Return the job's folder and the working folder as the nodes see them. Raises ConfigError.

        folder: the job's folder in the run folder, as this machine sees it.
        """
        return folder, Path.cwd()

    @abstractmethod
    def files(self, job: Job, config: str) -> dict[str, str]:
        """Return what starts the job, by file name. config: the run's resolved configuration, as YAML."""

    @abstractmethod
    def start(self, job: Job, submit: bool, report: Report) -> int:
        """Start the job, whose files are written, and return the exit code of the command.

        submit: hand the job to the scheduler; without it, report how to. Targets without a scheduler always start.
        Raises: MegamemError if the job cannot be started.
        """


T = TypeVar("T", bound=type[Target])
_known: dict[str, type[Target]] = {}


def register(target: T) -> T:
    """Make a target known; a class decorator. Raises ValueError where its name is taken."""
    if target.name in _known and _known[target.name].__qualname__ != target.__qualname__:
        raise ValueError(f"two targets are called {target.name!r}: {_known[target.name]} and {target}")
    _known[target.name] = target
    return target


@cache
def registered_targets() -> dict[str, type[Target]]:
    """Return all targets by name, sorted."""
    import_all(targets.__name__)
    for entry in entry_points(group="megamem.targets"):
        entry.load()
    return dict(sorted(_known.items()))


@cache
def cluster_config_type() -> type[ClusterConfig]:
    """Return the class of cluster files: `ClusterConfig` with a section for each target."""
    sections = {name: (target, target()) for name, target in registered_targets().items()}
    return create_model("ClusterConfig", __base__=ClusterConfig, **sections)  # type: ignore[call-overload]


def find_target(name: str, cluster: ClusterConfig) -> Target:
    """Return the target of this name with the settings that `cluster` has for it.

    Raises: ConfigError naming the nearest valid name.
    """
    known = registered_targets()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"--on {name}: no such target; {hint}valid: {', '.join(known)}")
    found = getattr(cluster, name)
    assert isinstance(found, Target)
    return found
