"""Run a function on several processes that can form one world, and get every rank's result back.

    results = run_distributed(2, "tests.distributed.test_harness:sum_over_ranks", {"value": 3})

Each rank is a process of its own with the environment torchrun would give it (RANK, LOCAL_RANK, WORLD_SIZE,
MASTER_ADDR, MASTER_PORT), so `Topology.start`, `torch.distributed.init_process_group` and
`deepspeed.init_distributed` work as in a real run on CPU. The rendezvous store lives in the calling process, on a
port the system chose, so worlds may run side by side.

    caller ── supervisor (forked from a process that has imported the heavy libraries; it forks, waits and reports)
                 ├── rank 0
                 └── rank 1 ...

Whoever dies takes those below along, SIGKILL included: no rank outlives the tests. It pays to start few worlds, to do
many checks in each, to return plain data and to assert in the caller.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from tests.processes import CONTEXT, end_with, end_with_starter

ROOT = Path(__file__).resolve().parents[2]
_SHOWN = 6000
_GRACE_S = 60
"""What the supervisor may take beyond the ranks' own time: imports, the first time."""


class WorldError(AssertionError):
    """A rank failed, died or did not finish; the message holds its traceback."""


def run_distributed(
    world_size: int,
    function: str,
    payload: Any = None,
    *,
    timeout_s: float = 1200,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call `function(payload)` on `world_size` processes.

    Args:
        function: `package.module:name`, importable from the repository's root.
        payload: nested dicts, lists, tuples of tensors, numbers, strings, booleans and None.
        timeout_s: after so many seconds the ranks are killed; the error shows where each one stood.
        env: further environment variables.
    Returns: what the function returned, per rank; the same kinds of data as `payload`.
    Raises: WorldError with the traceback of the rank that failed first.
    """
    with tempfile.TemporaryDirectory(prefix="megamem-world-") as name:
        folder = Path(name)
        torch.save(payload, folder / "payload")
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        variables = {
            **os.environ,
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            # the store at that port belongs to the caller: ranks join it, none of them opens the port
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "OMP_NUM_THREADS": "1",
            **(env or {}),
        }
        supervisor = CONTEXT.Process(target=_supervisor, args=(variables, function, folder, world_size, timeout_s))
        supervisor.start()
        try:
            supervisor.join(timeout_s + _GRACE_S)
        finally:
            if supervisor.is_alive():
                supervisor.kill()
                supervisor.join()
        if supervisor.exitcode != 0:
            failure = folder / "failure"
            raise WorldError(failure.read_text() if failure.exists() else _tail(folder / "output"))
        return [torch.load(folder / f"result-{rank}", weights_only=True) for rank in range(world_size)]


def _tail(path: Path) -> str:
    return path.read_text(errors="replace")[-_SHOWN:]


def _supervisor(
    variables: Mapping[str, str], function: str, folder: Path, world_size: int, timeout_s: float
) -> NoReturn:
    """Body of the supervisor's process. variables: the environment of all ranks."""
    end_with_starter()
    os.environ.clear()
    os.environ.update(variables)
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    code = 1
    try:
        code = _supervise(function, folder, world_size, timeout_s)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _supervise(function: str, folder: Path, world_size: int, timeout_s: float) -> int:
    """Fork the ranks and wait for them; writes `failure` and returns 1 if one ends badly or none ends in time."""
    importlib.import_module(function.split(":")[0])
    running = {_fork(rank, function, folder): rank for rank in range(world_size)}
    deadline = time.monotonic() + timeout_s
    failure = None
    while running and failure is None:
        for pid in list(running):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                rank = running.pop(pid)
                if status:
                    time.sleep(0.5)  # ranks that fail as a consequence write their tracebacks later than the cause
                    failure = _failure(rank, os.waitstatus_to_exitcode(status), world_size, folder)
        if failure is None and running and time.monotonic() > deadline:
            failure = _stuck(running, folder)
        time.sleep(0.01)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if failure is not None:
        (folder / "failure").write_text(failure)
    return int(failure is not None)


def _fork(rank: int, function: str, folder: Path) -> int:
    supervisor = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    end_with(supervisor)
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    output = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    _worker(rank, function, folder)


def _worker(rank: int, function: str, folder: Path) -> NoReturn:
    """Body of one rank's process."""
    faulthandler.register(signal.SIGUSR1)  # `_stuck` asks so where it stands
    torch.set_num_threads(1)
    code = 1
    try:
        module, name = function.split(":")
        payload = torch.load(folder / "payload", weights_only=True)
        result = getattr(sys.modules[module], name)(payload)
        torch.save(result, folder / f"result-{rank}")
        if dist.is_initialized():
            dist.barrier()  # a rank that leaves early would break the connections of slower ones
            dist.destroy_process_group()
        code = 0
    except BaseException:
        (folder / f"error-{rank}").write_text(traceback.format_exc())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _failure(rank: int, code: int, world_size: int, folder: Path) -> str:
    written = sorted(folder.glob("error-*"), key=lambda path: path.stat().st_mtime_ns)
    # SIGKILL leaves no traceback, and others fail because of it
    if written and code != -signal.SIGKILL:
        return f"rank {written[0].name.split('-')[1]} of {world_size} failed:\n{_tail(written[0])}"
    how = f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
    return f"rank {rank} of {world_size} {how}; its output:\n{_tail(folder / f'output-{rank}')}"


def _stuck(running: Mapping[int, int], folder: Path) -> str:
    for pid in running:
        os.kill(pid, signal.SIGUSR1)
    time.sleep(0.5)
    ranks = sorted(running.values())
    outputs = [f"--- output of rank {rank}:\n{_tail(folder / f'output-{rank}')}" for rank in ranks]
    return f"ranks {ranks} did not finish in time\n" + "\n".join(outputs)
