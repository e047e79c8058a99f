"""Start a job's processes on this machine with torchrun's agent, and end with the code of the rank that failed."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

COMMAND = (sys.executable, "-u", "-m", "megamem")
"""How a rank is started."""


def inside_job() -> bool:
    """Whether a launcher has started this process as a rank."""
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


def run_local(processes: int, arguments: Sequence[str], max_restarts: int = 0, stop_s: int = 30) -> int:
    """Run `megamem ARGUMENTS` on `processes` local ranks; returns their exit code. See `run_agent`."""
    with quiet_torch():
        from launchers.agent import run_agent
        from launchers.rendezvous import Node

    node = Node(processes, str(uuid.uuid4()), max_restarts=max_restarts, stop_s=stop_s)
    return run_agent(node, [*COMMAND, *arguments])


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Around torch's first import in an agent: without the C++ traces of a store that has gone, which is told in words.

    Ranks are not concerned.
    """
    name = "TORCH_CPP_LOG_LEVEL"
    given = name in os.environ
    os.environ.setdefault(name, "FATAL")
    try:
        yield
    finally:
        if not given:
            del os.environ[name]
