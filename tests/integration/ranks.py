"""Ranks of a job as processes that a test can watch, signal and read: forked from one process that imported torch.

Each rank has the environment torchrun would give it, its output goes to a file, and its exit code is kept.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.processes import CONTEXT, end_with_starter


class Job:
    """`world` ranks that call `function(*arguments)`. A context manager: what still runs at its end is killed."""

    def __init__(self, folder: Path, world: int, function: Callable[..., Any], *arguments: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.world = folder, world
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environment = {
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": "1",
        }
        self.processes = [
            CONTEXT.Process(target=_rank, args=(rank, environment, folder, function, arguments), daemon=True)
            for rank in range(world)
        ]
        for process in self.processes:
            process.start()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()

    def send(self, rank: int, number: signal.Signals) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def codes(self, timeout_s: float) -> list[int | None]:
        """Exit codes once all have ended or the time is up; None for a rank that still runs."""
        deadline = time.monotonic() + timeout_s
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return [process.exitcode for process in self.processes]

    def output(self, rank: int, stream: str = "err") -> str:
        path = self.folder / f"{stream}-{rank}"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for(self, pattern: str, timeout_s: float = 300, stream: str = "out") -> None:
        """Until rank 0's output matches."""
        deadline = time.monotonic() + timeout_s
        while not re.search(pattern, self.output(0, stream)):
            assert time.monotonic() < deadline, f"no {pattern!r} in\n{self.output(0)}\n{self.output(0, 'out')}"
            assert self.processes[0].is_alive(), f"rank 0 ended: {self.output(0)}\n{self.output(1)}"
            time.sleep(0.05)

    def results(self, timeout_s: float = 600) -> list[Any]:
        """What the function returned on each rank."""
        codes = self.codes(timeout_s)
        assert codes == [0] * self.world, "\n".join([str(codes), *(self.output(rank) for rank in range(self.world))])
        return [torch.load(self.folder / f"result-{rank}", weights_only=True) for rank in range(self.world)]


def _rank(rank: int, environment: dict[str, str], folder: Path, function: Callable[..., Any], arguments: Any) -> None:
    end_with_starter()
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    for descriptor, stream in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{stream}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    torch.set_num_threads(1)
    code = 1
    try:
        result = function(*arguments)
        torch.save(result, folder / f"result-{rank}")
        if dist.is_initialized():
            dist.barrier()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def command(*arguments: str) -> None:
    """`megamem ARGUMENTS` in this process."""
    from megamem.cli.main import main

    sys.argv = ["megamem", *arguments]
    main()
