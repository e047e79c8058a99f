"""Measurements that one rank makes of itself, its host and the folder of runs."""

from __future__ import annotations

import contextlib
import re
import shutil
import statistics
import time
from pathlib import Path

import torch

from megamem.runs.folder import environment

SECONDS = 0.3
"""Duration of each measurement of matrix products."""
SIZES = {"cpu": 512, "cuda": 8192}
"""Sizes of square matrices: large enough for full speed, small enough for seconds where a processor has no BF16 units
(0.7 s a product were seen)."""
REPEATS = 3
"""Least number of products, however long they take."""
SEEN_S = 5.0
"""Time after which a new file must be visible on other hosts: network file systems hold it back for seconds."""


def versions(device: torch.device) -> dict[str, str]:
    """Return the versions of everything that ranks must agree on, by name."""
    here = environment()
    found = {"python": here["python"], **here["packages"], "revision": here["revision"] or "unknown"}
    if device.type == "cuda":
        found["cuda"] = str(torch.version.cuda)
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["driver"] = driver()
    return found


def driver(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Return the version of the NVIDIA driver as the kernel reports it."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    found = re.search(r"Kernel Module\D*(\d+(?:\.\d+)+)", text)
    return found[1] if found else "unknown"


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of products of square matrices, the median over SECONDS."""
    size = SIZES[device.type]
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    times: list[float] = []
    left @ right  # chooses kernels, fills caches
    while len(times) < REPEATS or sum(times) < SECONDS:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begun = time.perf_counter()
        left @ right
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begun)
    return 2 * size**3 / statistics.median(times)


def free_memory(device: torch.device) -> int:
    """Return the free bytes of the device, or of the host for the CPU (0 where the kernel does not report them)."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    meminfo = Path("/proc/meminfo")
    text = meminfo.read_text(encoding="utf-8") if meminfo.exists() else ""
    found = re.search(r"^MemAvailable:\s*(\d+) kB", text, re.MULTILINE)
    return 1024 * int(found[1]) if found else 0


class SharedFolder:
    """A check that a folder can be written, and that files which rank 0 writes there are visible."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Remember the folder and this rank."""
        self.folder, self.rank = folder, rank

    def _file(self, token: str, rank: int) -> Path:
        """Return the file of a rank."""
        return self.folder / f".preflight-{token}-{rank}"

    def offer(self, token: str) -> None:
        """Make the folder, as a run would, and put a file there; on rank 0 only.

        token: of this check alone, so that several checks can share a folder.
        """
        if self.rank == 0:
            with contextlib.suppress(OSError):  # `problem` finds the same and reports it
                self.folder.mkdir(parents=True, exist_ok=True)
                self._file(token, 0).write_text(token, encoding="utf-8")

    def problem(self, token: str) -> str | None:
        """Return what is wrong with the folder on this rank, None if nothing is; called after rank 0's `offer`."""
        try:
            if self.rank != 0:
                deadline = time.monotonic() + SEEN_S
                while not self._file(token, 0).exists():
                    if time.monotonic() > deadline:
                        return "does not show what rank 0 wrote there; is it on a file system that all hosts share?"
                    time.sleep(0.1)
                    if self.folder.exists():
                        next(self.folder.iterdir(), None)  # makes network file systems look again
            mine = self._file(token, self.rank)
            mine.write_text(token, encoding="utf-8")
            if mine.read_text(encoding="utf-8") != token:
                return "gives back something else than was written"
            if self.rank != 0:
                mine.unlink()
        except OSError as error:
            return f"cannot be written ({error.strerror})"
        return None

    def clear(self, token: str) -> None:
        """Remove rank 0's file once all have looked; on rank 0 only."""
        if self.rank == 0:
            with contextlib.suppress(OSError):
                self._file(token, 0).unlink()

    def free(self) -> int | None:
        """Return the free bytes of the disk; None if they cannot be read."""
        try:
            return shutil.disk_usage(self.folder).free
        except OSError:
            return None
