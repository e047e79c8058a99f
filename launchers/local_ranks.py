"""Start ranks on this machine with torchrun's agent, and end with the code of the rank that failed.

Nothing here imports torch before an agent starts, so that commands that start no ranks stay fast.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from launchers.node import Node
from launchers.signals import STOPS, not_ignored
from megamem.errors import STOPPED

COMMAND = (sys.executable, "-u", "-m", "megamem")
"""The command of a rank, without its arguments."""


def inside_job() -> bool:
    """Return whether a launcher has started this process as a rank."""
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


def run_local(processes: int, arguments: Sequence[str], max_restarts: int = 0, stop_s: int = 30) -> int:
    """Run `megamem ARGUMENTS` on `processes` ranks of this machine alone and return their exit code.

    stop_s: seconds that ranks have to end after a signal. Raises: see `run_agent`.
    """
    return _run_agent(Node(processes, str(uuid.uuid4()), max_restarts=max_restarts, stop_s=stop_s), arguments)


def run_node(node: Node, arguments: Sequence[str], listen: bool) -> int:
    """Run `megamem ARGUMENTS` on this node's ranks, with the other nodes of the job, and return the exit code.

    Args:
        listen: take from standard input the job's token, then names of signals, and its end for SIGTERM.

    Raises: see `run_agent`.
    """
    # importing torch takes seconds, in which a signal must end the node too; then the agent handles them. At once, and
    # not by an exception, which is lost where Python runs a callback of its own, as it often does while it imports
    for number in not_ignored():
        signal.signal(number, lambda *_: os._exit(STOPPED))
    if listen:
        node = replace(node, token=sys.stdin.readline().strip())
        threading.Thread(target=_listen, name="signals", daemon=True).start()
    return _run_agent(node, arguments)


def _run_agent(node: Node, arguments: Sequence[str]) -> int:
    """Import torch, then run the agent."""
    with _quiet_torch():
        from launchers.agent import run_agent
    return run_agent(node, [*COMMAND, *arguments])


def _listen() -> None:
    """Send this process the signals whose names come from its parent, which may be unable to send them itself."""
    names = {number.name: number for number in STOPS}
    for line in sys.stdin:
        if (number := names.get(line.strip())) is not None:
            os.kill(os.getpid(), number)
    os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def _quiet_torch() -> Iterator[None]:
    """Import torch in the block without the C++ traces of a store that has gone, which the agent reports in words.

    The environment is as before afterwards, so ranks are not concerned.
    """
    name = "TORCH_CPP_LOG_LEVEL"
    given = name in os.environ
    os.environ.setdefault(name, "FATAL")
    try:
        yield
    finally:
        if not given:
            del os.environ[name]
