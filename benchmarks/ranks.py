"""Ranks of a benchmark: processes of its own module on this machine, each of which reports one record."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

FOUND = "found: "


def run_ranks(
    module: str, arguments: Sequence[str], world: int, environment: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Run `python -m MODULE ARGUMENTS` as so many ranks with a thread each, and return what they report, by rank.

    Raises: SystemExit naming the ranks that failed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = {**os.environ, **(environment or {}), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    env |= {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, "-m", module, *arguments]
    ranks = [
        subprocess.Popen(
            command, env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(world)
    ]
    outputs = [rank.communicate()[0] for rank in ranks]
    if failed := [rank for rank, process in enumerate(ranks) if process.returncode]:
        raise SystemExit(f"{module} {' '.join(arguments)}: ranks {failed} failed")
    lines = [line for output in outputs for line in output.splitlines() if line.startswith(FOUND)]
    return [json.loads(line.removeprefix(FOUND)) for line in lines]


def report(record: Mapping[str, Any]) -> None:
    """Hand a rank's record to `run_ranks`."""
    print(FOUND + json.dumps(record))
