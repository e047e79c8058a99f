"""What one core of this machine reaches, measured in about a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F

from megamem.planning.roofline import MatmulRates, Rates


@cache
def cpu_rates() -> Rates:
    """Return the rates of one thread: it computes what it launches, so that both times add up."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            return _measured()
    finally:
        torch.set_num_threads(threads)


def _measured() -> Rates:
    """Return the rates, each from operations like those of a layer."""
    matmul: MatmulRates = {"fp32": _matmul(torch.float32), "bf16": _matmul(torch.bfloat16)}
    q = torch.ones(1, 4, 512, 64)
    pairs = 4 * 512 * 512 / 2
    attention = 2 * pairs * 128 / _seconds(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True))
    # more bytes than caches hold
    large = torch.ones(2**23)
    memory = 3 * large.nbytes / _seconds(lambda: large + large)
    small = torch.ones(8)
    launch = _seconds(lambda: small + small, 2000)
    return Rates(
        matmul=matmul, attention=attention, attention_backward=attention, memory=memory, kernel=0.0, launch=launch,
        ahead=False,
    )  # fmt: skip


def _matmul(dtype: torch.dtype, size: int = 512) -> float:
    """Return the FLOP/s of products of square matrices."""
    a = torch.ones(size, size, dtype=dtype)
    return 2 * size**3 / _seconds(lambda: a @ a)


def _seconds(run: Callable[[], object], times: int = 5) -> float:
    """Return the seconds of a call, the best of three turns of so many."""
    run()
    found = []
    for _ in range(3):
        begun = time.perf_counter()
        for _ in range(times):
            run()
        found.append((time.perf_counter() - begun) / times)
    return min(found)
