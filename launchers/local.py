"""Start a job's processes on this machine with torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence


def inside_job() -> bool:
    """Whether a launcher has started this process as a rank."""
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


def torchrun_command(processes: int, arguments: Sequence[str]) -> list[str]:
    """The command that runs `megamem ARGUMENTS` on `processes` local ranks."""
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes),
        "-m", "megamem", *arguments,
    ]  # fmt: skip


def run_local(processes: int, arguments: Sequence[str]) -> int:
    """Run it and return its exit code (torchrun's own: 1 if a rank failed). Signals are passed on."""
    environment = dict(os.environ)
    cores = len(os.sched_getaffinity(0))
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // processes)))
    job = subprocess.Popen(torchrun_command(processes, arguments), env=environment)
    passed = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, lambda n, _: job.send_signal(n)) for number in passed}
    try:
        return job.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
