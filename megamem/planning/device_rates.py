"""What a device reaches, measured in a few seconds: one core of this machine, or a CUDA device.

Each rate comes from operations like those of a layer. They take turns, so that a machine that others slow down for a
while is as slow for one as for the other, and the median of their turns counts.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from megamem.planning.roofline import Rates

SMALL_PRODUCTS = 0.4
"""What the small products inside a kernel of our own are taken to reach of what large ones do; see devices.yaml."""
TURNS = 5
"""How often each is measured."""
TURN = 0.03
"""Seconds of a turn."""
Run = Callable[[], object]


@dataclass(frozen=True)
class Sizes:
    """Sizes of what is measured: large enough for full speed, small enough for a few seconds."""

    square: int
    """Rows and columns of the matrices that are multiplied."""
    small: tuple[int, int]
    """How many small matrices, and their rows and columns: a head's width, or an inner chunk."""
    attention: tuple[int, int, int, int]
    """Rows, heads, tokens and width of a head."""
    attention_dtype: torch.dtype
    tensors: tuple[int, int]
    """How many FP32 tensors no cache holds together, and the numbers of each: as many as a layer's tensors have."""
    launches: int
    """Operations on small tensors, one after the other."""


SIZES = {
    "cpu": Sizes(512, (256, 64), (1, 4, 1024, 64), torch.float32, (64, 2**20), 500),
    "cuda": Sizes(8192, (256, 64), (8, 16, 4096, 128), torch.bfloat16, (2, 2**28), 1000),
}
"""By kind of device."""


@cache
def cpu_rates() -> Rates:
    """Return the rates of one thread: it computes what it launches, so that all times add up."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return device_rates(torch.device("cpu"), SIZES["cpu"])
    finally:
        torch.set_num_threads(threads)


def device_rates(device: torch.device, sizes: Sizes) -> Rates:
    """Return the rates of a device. FP32 products are measured without TF32, as runs compute them."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        shared = {"sums": _sums(device, sizes.tensors)} | _launches(device, sizes.launches)
        shared |= _products(device, sizes.square) | _attention(device, sizes)
        if device.type == "cuda":
            return _of_a_device(_seconds(shared | _kernels(device, sizes), device), sizes)
        return _of_a_core(_seconds(shared | _of_cores_alone(sizes), device), sizes)
    finally:
        torch.set_float32_matmul_precision(precision)


def _of_a_device(seconds: Mapping[str, float], sizes: Sizes) -> Rates:
    """Return the rates of a CUDA device from the seconds of each measurement."""
    square, (pairs, width), (tensors, elements) = 2 * sizes.square**3, _pairs(sizes), sizes.tensors
    tf32 = SMALL_PRODUCTS * square / seconds["tf32"]
    return Rates(
        matmul={"fp32": square / seconds["fp32"], "bf16": square / seconds["bf16"], "tf32": tf32},
        attention=4 * pairs * width / seconds["attention"],
        attention_backward=10 * pairs * width / seconds["attention_backward"],
        memory=tensors * 12 * elements / seconds["sums"],
        kernel=seconds["kernel"] / sizes.launches,
        launch=seconds["launch"] / (2 * sizes.launches),
        view=seconds["view"] / (2 * sizes.launches),
        multiprocessors=torch.cuda.get_device_properties(torch.device("cuda")).multi_processor_count,
    )


def _of_a_core(seconds: Mapping[str, float], sizes: Sizes) -> Rates:
    """Return the rates of a core from the seconds of each measurement, but for the bytes that each moves."""
    (pairs, width), (tensors, elements), (many, side) = _pairs(sizes), sizes.tensors, sizes.small
    memory = tensors * 12 * elements / seconds["sums"]
    square = max(seconds["fp32"] - 12 * sizes.square**2 / memory, 0.5 * seconds["fp32"])
    # forward one tensor is read and one written, backward two are read and one is written
    functions = max(seconds["functions"] - 20 * elements / memory, 0.1 * seconds["functions"])
    small = seconds["small"] - 2 * many * 12 * side**2 / memory
    exact = 2 * sizes.square**3 / square
    return Rates(
        # a core has no units of its own for TF32, and no kernels
        matmul={"fp32": exact, "bf16": 2 * sizes.square**3 / seconds["bf16"], "tf32": exact},
        attention=4 * pairs * width / seconds["attention"],
        attention_backward=10 * pairs * width / seconds["attention_backward"],
        memory=memory,
        functions=2 * elements / functions,
        half_rate_side=max(0.0, side * (small * exact / (4 * many * side**3) - 1)),
        kernel=0.0,
        launch=seconds["launch"] / (2 * sizes.launches),
        view=seconds["view"] / (2 * sizes.launches),
        ahead=False,
    )


def _products(device: torch.device, size: int) -> dict[str, Run]:
    """Return products of square matrices of random numbers: equal ones would need less power."""
    a = torch.randn(size, size, device=device)
    half = a.bfloat16()
    return {"fp32": lambda: a @ a, "bf16": lambda: half @ half}


def _attention(device: torch.device, sizes: Sizes) -> dict[str, Run]:
    """Return causal fused attention, forward and backward."""
    drawn = torch.randn(3, *sizes.attention, device=device).to(sizes.attention_dtype)
    q, k, v = (tensor.requires_grad_() for tensor in drawn.unbind())

    def attend() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    out = attend()
    ones = torch.ones_like(out)
    return {
        "attention": torch.no_grad()(attend),
        "attention_backward": lambda: torch.autograd.grad(out, (q, k, v), ones, retain_graph=True),
    }


def _pairs(sizes: Sizes) -> tuple[float, int]:
    """Return the pairs of queries and keys that causal attention has, counted as `operations.py` does, and a head's
    width: a pair takes two products of that width forward, five backward (the scores anew, and four with gradients)."""
    rows, heads, tokens, width = sizes.attention
    return rows * heads * tokens**2 / 2, width


def _sums(device: torch.device, sizes: tuple[int, int]) -> Run:
    """Return sums of tensors that no cache holds: two are read, one is written and kept as for a backward pass."""
    tensors, elements = sizes
    drawn = [torch.ones(elements, device=device) for _ in range(tensors)]
    kept: deque[Tensor] = deque(maxlen=tensors // 2)

    def add_all() -> None:
        for at, tensor in enumerate(drawn):
            kept.append(tensor + drawn[at - tensors // 2])

    return add_all


def _launches(device: torch.device, launches: int) -> dict[str, Run]:
    """Return chains of products of small tensors and of views, forward and backward, as the host meets them."""
    small, learned = torch.ones(8, device=device), torch.ones(8, device=device, requires_grad=True)

    def chain(link: Callable[[Tensor], Tensor]) -> None:
        out = learned
        for _ in range(launches):
            out = link(out)
        torch.autograd.grad(out, learned, small)

    return {"launch": lambda: chain(lambda x: x * small), "view": lambda: chain(lambda x: x.view(8))}


def _of_cores_alone(sizes: Sizes) -> dict[str, Run]:
    """Return SiLU, forward and backward, and many products of small matrices, one in two transposed as in training."""
    a, b = torch.randn(2, sizes.small[0], sizes.small[1], sizes.small[1]).unbind()
    drawn = itertools.cycle([torch.randn(sizes.tensors[1]) for _ in range(8)])

    def activate() -> None:
        tensor = next(drawn)
        torch.ops.aten.silu_backward(F.silu(tensor), tensor)

    return {"functions": activate, "small": lambda: (a @ b, a @ b.mT)}


def _kernels(device: torch.device, sizes: Sizes) -> dict[str, Run]:
    """Return products in TF32, and the smallest operation: a graph of them, which the host starts once."""
    a = torch.randn(sizes.square, sizes.square, device=device)

    def tf32() -> None:
        torch.set_float32_matmul_precision("high")
        a @ a
        torch.set_float32_matmul_precision("highest")

    small = torch.ones(8, device=device)
    torch.add(small, small)  # loads the kernel before the capture
    _wait(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(sizes.launches):
            small = small + small
    return {"tf32": tf32, "kernel": graph.replay}


def _seconds(runs: Mapping[str, Run], device: torch.device) -> dict[str, float]:
    """Return the seconds of a call of each, the medians of their turns.

    On a core it is the thread's own time: what other processes take is not in it.
    """
    clock = time.thread_time if device.type == "cpu" else time.perf_counter
    found: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(TURNS + 1):
        for name, run in runs.items():
            # the first turn says how long a call takes
            calls = max(1, round(TURN / found[name][0])) if turn else 1
            _wait(device)
            begun = clock()
            for _ in range(calls):
                run()
            if name not in ("launch", "view"):  # the device works on them later
                _wait(device)
            found[name].append((clock() - begun) / calls)
    return {name: statistics.median(times[1:]) for name, times in found.items()}


def _wait(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
