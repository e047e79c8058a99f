"""What the processor can really do."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

_PROBE = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"
_ISA = "ONEDNN_MAX_CPU_ISA"
_WORKS = "MEGAMEM_AMX_WORKS"
"""Tells child processes that the product was tried already."""


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@lru_cache(maxsize=1)
def amx_announced() -> bool:
    """Whether the kernel lists AMX tile instructions for this processor."""
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "amx_tile" in cpuinfo.read_text(encoding="utf-8", errors="replace")


def avoid_broken_amx() -> str | None:
    """Keep BF16 on CPU from dying of an illegal instruction.

    Some virtual machines announce AMX and fault on its first use, in oneDNN's first BF16 product. Where AMX is
    announced, one such product is tried in a process of its own; if that is killed, oneDNN is held to AVX-512 in
    this process and its children (it reads the variable at its first call). Returns a line saying so, or None.
    """
    if _ISA in os.environ or _WORKS in os.environ or not amx_announced():
        return None
    probe = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, check=False)
    if probe.returncode >= 0:
        os.environ[_WORKS] = "1"
        return None
    os.environ[_ISA] = "AVX512_CORE_BF16"
    return f"AMX is announced but faults on this machine; BF16 on CPU uses AVX-512 ({_ISA}={os.environ[_ISA]})"
