"""Run a function on several processes that can form one world, and get every rank's result back.

    results = run_distributed(2, "tests.distributed.test_harness:sum_over_ranks", {"value": 3})

Each rank is a fresh Python process with the environment torchrun would give it (RANK, LOCAL_RANK, WORLD_SIZE,
MASTER_ADDR, MASTER_PORT), so `Topology.start`, `torch.distributed.init_process_group` and
`deepspeed.init_distributed` work as in a real run. The rendezvous store lives in the calling process, on a port the
system chose, so worlds may run side by side. Importing torch, Megatron and DeepSpeed takes seconds per world: start
few worlds, do many checks in each, return plain data and assert in the parent.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
_SHOWN = 6000


class WorldError(AssertionError):
    """A rank failed, died or did not finish; the message holds its traceback."""


def run_distributed(
    world_size: int,
    function: str,
    payload: Any = None,
    *,
    timeout_s: float = 240,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call `function(payload)` on `world_size` processes.

    Args:
        function: `package.module:name`, importable from the repository's root.
        payload: nested dicts, lists, tuples of tensors, numbers, strings, booleans and None.
        timeout_s: after so many seconds the processes are killed; the error shows where each one stood.
        env: further environment variables.
    Returns: what the function returned, per rank; the same kinds of data as `payload`.
    Raises: WorldError with the traceback of the rank that failed first.
    """
    with tempfile.TemporaryDirectory(prefix="megamem-world-") as name:
        folder = Path(name)
        torch.save(payload, folder / "payload")
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        processes = [_spawn(rank, world_size, function, folder, store.port, env) for rank in range(world_size)]
        try:
            _wait(processes, folder, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [torch.load(folder / f"result-{rank}", weights_only=True) for rank in range(world_size)]


def _spawn(
    rank: int, world_size: int, function: str, folder: Path, port: int, env: Mapping[str, str] | None
) -> subprocess.Popen[bytes]:
    variables = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # the store at that port belongs to the parent: ranks join it, none of them opens the port
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        **(env or {}),
    }
    command = [sys.executable, "-m", "tests.distributed.harness", function, str(folder), str(rank)]
    with (folder / f"output-{rank}").open("wb") as output:
        return subprocess.Popen(command, env=variables, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path, deadline: float) -> None:
    """Until all ranks ended well; raises WorldError soon after one ends badly or at the deadline."""
    while True:
        codes = [process.poll() for process in processes]
        if all(code == 0 for code in codes):
            return
        if any(code not in (None, 0) for code in codes):
            time.sleep(0.5)  # let ranks that fail as a consequence write their tracebacks, which sort after the cause
            raise WorldError(_failure(processes, folder))
        if time.monotonic() > deadline:
            stuck = [rank for rank, code in enumerate(codes) if code is None]
            for rank in stuck:
                processes[rank].send_signal(signal.SIGUSR1)  # has it print where it stands, see `_worker`
            time.sleep(0.5)
            raise WorldError(f"ranks {stuck} did not finish in time\n" + "\n".join(_output(folder, r) for r in stuck))
        time.sleep(0.02)


def _failure(processes: list[subprocess.Popen[bytes]], folder: Path) -> str:
    written = sorted(folder.glob("error-*"), key=lambda path: path.stat().st_mtime_ns)
    if written:
        first = written[0]
        return f"rank {first.name.split('-')[1]} of {len(processes)} failed:\n{first.read_text()[-_SHOWN:]}"
    rank, code = next((r, p.returncode) for r, p in enumerate(processes) if p.returncode not in (None, 0))
    how = f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
    return f"rank {rank} of {len(processes)} {how}\n{_output(folder, rank)}"


def _output(folder: Path, rank: int) -> str:
    text = (folder / f"output-{rank}").read_text(errors="replace")
    return f"--- output of rank {rank}:\n{text[-_SHOWN:]}"


def _worker(function: str, folder: Path, rank: int) -> None:
    """Body of one process."""
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    try:
        module, name = function.split(":")
        payload = torch.load(folder / "payload", weights_only=True)
        result = getattr(importlib.import_module(module), name)(payload)
        torch.save(result, folder / f"result-{rank}")
    except BaseException:
        path = folder / f"error-{rank}"
        path.write_text(traceback.format_exc())
        raise
    if dist.is_initialized():
        # a rank that leaves early would break the connections of slower ones
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    _worker(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
