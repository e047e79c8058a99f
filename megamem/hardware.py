"""The processor of this machine: how many cores a process may use, and which instructions work."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

_PROBE = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"
_ISA = "ONEDNN_MAX_CPU_ISA"
_WORKS = "MEGAMEM_AMX_WORKS"
"""Variable that tells child processes that the product was tried already."""


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@lru_cache(maxsize=1)
def amx_announced() -> bool:
    """Return whether the kernel lists AMX tile instructions for this processor."""
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "amx_tile" in cpuinfo.read_text(encoding="utf-8", errors="replace")


def avoid_broken_amx() -> str | None:
    """Keep BF16 on the CPU from dying of an illegal instruction; return a line about it, None where all is well.

    Some virtual machines announce AMX and fault on its first use, in oneDNN's first BF16 product. Where AMX is
    announced, one such product is tried in a process of its own; if that is killed, oneDNN is held to AVX-512 in
    this process and its children (it reads the variable at its first call).
    """
    if _ISA in os.environ or _WORKS in os.environ or not amx_announced():
        return None
    probe = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, check=False)
    # a process that was killed by a signal has a negative return code
    if probe.returncode >= 0:
        os.environ[_WORKS] = "1"
        return None
    os.environ[_ISA] = "AVX512_CORE_BF16"
    return f"AMX is announced but faults on this machine; BF16 on CPU uses AVX-512 ({_ISA}={os.environ[_ISA]})"
