"""What a device reaches, measured in a second or two: one core of this machine, or a CUDA device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from megamem.planning.roofline import Rates

SMALL_PRODUCTS = 0.4
"""What the small products inside a kernel of our own are taken to reach of what large ones do; see devices.yaml."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of what is measured: large enough for full speed, small enough for about a second."""

    square: int
    """Rows and columns of the matrices that are multiplied."""
    attention: tuple[int, int, int, int]
    """Rows, heads, tokens and width of a head."""
    attention_dtype: torch.dtype
    elements: int
    """FP32 numbers of a tensor that no cache holds."""
    launches: int
    """Operations on small tensors, one after the other."""


SIZES = {
    "cpu": Sizes(512, (1, 4, 512, 64), torch.float32, 2**23, 2000),
    "cuda": Sizes(8192, (8, 16, 4096, 128), torch.bfloat16, 2**28, 2000),
}
"""By kind of device."""


@cache
def cpu_rates() -> Rates:
    """Return the rates of one thread: it computes what it launches, so that both times add up."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return device_rates(torch.device("cpu"), SIZES["cpu"])
    finally:
        torch.set_num_threads(threads)


def device_rates(device: torch.device, sizes: Sizes) -> Rates:
    """Return the rates of a device, each from operations like those of a layer, the best of some turns.

    FP32 products are measured as runs compute them, without TF32 (`Topology.start`).
    """
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        forward, backward = _attention(device, sizes)
        with torch.no_grad():
            exact = _matmul(device, torch.float32, sizes.square)
            return Rates(
                matmul={
                    "fp32": exact,
                    "bf16": _matmul(device, torch.bfloat16, sizes.square),
                    # a core has no units of its own for TF32, and no kernels
                    "tf32": exact if device.type == "cpu" else SMALL_PRODUCTS * _tf32(device, sizes.square),
                },
                attention=forward,
                attention_backward=backward,
                memory=_memory(device, sizes.elements),
                kernel=_kernel(device, sizes.launches) if device.type == "cuda" else 0.0,
                launch=_launch(device, sizes.launches),
                multiprocessors=(
                    torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
                ),
                ahead=device.type == "cuda",
            )
    finally:
        torch.set_float32_matmul_precision(precision)


def _memory(device: torch.device, elements: int) -> float:
    """Return the bytes per second of a sum of two large tensors: two are read, one is written."""
    large = torch.ones(elements, device=device)
    return 3 * large.nbytes / _seconds(lambda: large + large, device)


def _matmul(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Return the FLOP/s of products of square matrices of random numbers: equal ones would need less power."""
    a = torch.randn(size, size, device=device).to(dtype)
    return 2 * size**3 / _seconds(lambda: a @ a, device)


def _tf32(device: torch.device, size: int) -> float:
    """Return the FLOP/s of products of large square FP32 matrices in TF32."""
    torch.set_float32_matmul_precision("high")
    try:
        return _matmul(device, torch.float32, size)
    finally:
        torch.set_float32_matmul_precision("highest")


def _attention(device: torch.device, sizes: Sizes) -> tuple[float, float]:
    """Return the FLOP/s of causal fused attention, forward and backward, counted as `operations.py` does."""
    rows, heads, tokens, width = sizes.attention
    drawn = torch.randn(3, rows, heads, tokens, width, device=device).to(sizes.attention_dtype)
    q, k, v = (tensor.requires_grad_() for tensor in drawn.unbind())
    pairs = rows * heads * tokens**2 / 2

    def attend() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    with torch.no_grad():
        forward = _seconds(attend, device)
    out = attend()
    ones = torch.ones_like(out)
    backward = _seconds(lambda: torch.autograd.grad(out, (q, k, v), ones, retain_graph=True), device)
    # two products forward; the scores anew and four products with gradients backward
    return 4 * pairs * width / forward, 10 * pairs * width / backward


def _launch(device: torch.device, launches: int) -> float:
    """Return the seconds of host time that an operation on a small tensor takes; a CUDA device works on them later."""
    small = torch.ones(8, device=device)
    found = []
    for _ in range(3):
        _wait(device)
        begun = time.perf_counter()
        for _ in range(launches):
            torch.add(small, small)
        found.append((time.perf_counter() - begun) / launches)
    return min(found)


def _kernel(device: torch.device, launches: int) -> float:
    """Return the seconds of the smallest operation on a CUDA device: of a graph of them, which the host starts once."""
    small = torch.ones(8, device=device)
    torch.add(small, small)  # loads the kernel before the capture
    _wait(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            small = small + small
    return _seconds(graph.replay, device) / launches


def _seconds(run: Callable[[], object], device: torch.device, times: int = 5) -> float:
    """Return the seconds of a call, the best of three turns of so many."""
    run()
    found = []
    for _ in range(3):
        _wait(device)
        begun = time.perf_counter()
        for _ in range(times):
            run()
        _wait(device)
        found.append((time.perf_counter() - begun) / times)
    return min(found)


def _wait(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
