"""A self-test of torch.distributed: two real processes on this machine, every collective megamem uses, checked values.

`run_self_test` starts `python -m megamem.parallel.self_test` twice and returns what the ranks measured.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from megamem.parallel.control import LOOPBACK, serve_store

PROCESSES = 2
ELEMENTS = 2**18
"""Of each rank's float32 tensor: 1 MiB."""
REPEATS = 5


class SelfTestError(Exception):
    """The processes could not start, talk or agree; the message is one line."""


def run_self_test(backend: str, timeout_s: float = 120) -> dict[str, float]:
    """Median milliseconds of each collective on 1 MiB, between two processes.

    Args:
        backend: `gloo` (CPU) or `nccl` (the first two CUDA devices).
        timeout_s: after so many seconds the processes are killed.
    Raises: SelfTestError naming what failed.
    """
    store = serve_store(0, timedelta(seconds=timeout_s), loopback=True)
    with tempfile.TemporaryDirectory(prefix="megamem-self-test-") as name:
        outputs = [Path(name) / f"rank-{rank}" for rank in range(PROCESSES)]
        processes = [_start(rank, backend, store.port, timeout_s, outputs[rank]) for rank in range(PROCESSES)]
        try:
            _wait(processes, outputs, time.monotonic() + timeout_s, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        timings: dict[str, float] = json.loads(outputs[0].read_text().splitlines()[-1])
    return timings


def _start(rank: int, backend: str, port: int, timeout_s: float, output: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", __name__, backend, str(rank), str(port), str(timeout_s)]
    with output.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)


def _wait(processes: list[subprocess.Popen[bytes]], outputs: list[Path], deadline: float, timeout_s: float) -> None:
    while any(process.poll() is None for process in processes):
        if any(process.poll() not in (None, 0) for process in processes):
            time.sleep(0.2)  # the other rank may know the cause
            break
        if time.monotonic() > deadline:
            waiting = ", ".join(f"rank {rank}" for rank, process in enumerate(processes) if process.poll() is None)
            raise SelfTestError(f"no answer from {waiting} within {timeout_s:g} s")
        time.sleep(0.02)
    failed = [rank for rank, process in enumerate(processes) if process.poll() not in (None, 0)]
    if failed:
        lines = outputs[failed[0]].read_text(errors="replace").strip().splitlines() or ["no output"]
        raise SelfTestError(f"rank {failed[0]} exited with {processes[failed[0]].returncode}: {lines[-1]}")


def _collectives(rank: int, device: torch.device) -> dict[str, tuple[Callable[[], Tensor], Tensor]]:
    """Return each collective by name, and the value it must leave on this rank."""
    base = torch.arange(ELEMENTS, dtype=torch.float32, device=device) % 1000
    mine, zeros = base + rank, torch.zeros(ELEMENTS, device=device)

    def all_reduce() -> Tensor:
        out = mine.clone()
        dist.all_reduce(out)
        return out

    def broadcast() -> Tensor:
        out = mine.clone()
        dist.broadcast(out, src=0)
        return out

    def all_gather() -> Tensor:
        out = torch.zeros(PROCESSES * ELEMENTS, device=device)
        dist.all_gather_into_tensor(out, mine)
        return out

    def reduce_scatter() -> Tensor:
        out = torch.zeros(ELEMENTS // PROCESSES, device=device)
        dist.reduce_scatter_tensor(out, mine.clone())
        return out

    def send_and_receive() -> Tensor:
        out = zeros.clone()
        if rank == 0:
            dist.send(mine, dst=1)
            dist.recv(out, src=1)
        else:
            dist.recv(out, src=0)
            dist.send(mine, dst=0)
        return out

    total = PROCESSES * base + sum(range(PROCESSES))
    return {
        "all-reduce": (all_reduce, total),
        "broadcast": (broadcast, base),
        "all-gather": (all_gather, torch.cat([base + r for r in range(PROCESSES)])),
        "reduce-scatter": (reduce_scatter, total.chunk(PROCESSES)[rank]),
        "send/recv": (send_and_receive, base + (1 - rank)),
    }


def _measure(collective: Callable[[], Tensor], expected: Tensor) -> float:
    """Return the median milliseconds of a collective; raise SelfTestError if it does not give `expected` [...]."""
    times = []
    for _ in range(REPEATS + 1):
        begun = time.perf_counter()
        out = collective()
        if out.is_cuda:
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - begun))
        if not torch.equal(out, expected):
            raise SelfTestError("wrong values")
    return statistics.median(times[1:])


def main(backend: str, rank: int, port: int, timeout_s: float) -> dict[str, float]:
    """One rank's part; returns milliseconds by collective."""
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    timeout = timedelta(seconds=timeout_s)
    store = TCPStore(LOOPBACK, port, is_master=False, timeout=timeout)
    options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    dist.init_process_group(backend, store=store, rank=rank, world_size=PROCESSES, timeout=timeout, **options)
    timings = {}
    for name, (collective, expected) in _collectives(rank, device).items():
        try:
            timings[name] = _measure(collective, expected)
        except SelfTestError as error:
            raise SelfTestError(f"{name}: {error}") from None
    dist.barrier()
    dist.destroy_process_group()
    return timings


if __name__ == "__main__":
    found = main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
    sys.stdout.write(json.dumps(found) + "\n")
