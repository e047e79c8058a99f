"""Start jobs: what a target (a cluster, this machine) is, the agent on each node, and what is kept of a start."""

from __future__ import annotations

import pkgutil

from launchers import targets

DEFAULT_TARGET = "local"
"""Name of the target of a job that names none."""


def target_names() -> tuple[str, ...]:
    """Return the names of the targets of this package, which are the names of their files; nothing is imported."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(targets.__path__)))
