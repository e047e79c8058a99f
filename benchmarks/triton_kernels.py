"""What the Triton kernels of deep memories take of an H100's multiprocessors, compiled for it without one.

    python -m benchmarks.triton_kernels [--units 32 64] [--warps 4 8] [--stages 1 2] [--precision tf32]

At the shapes of the 760M models: heads of 96, 384 inner units, inner chunks of 64 tokens. Needs the package triton,
whose compiler counts; nothing runs. Registers are those of a thread (at most 255), spills the bytes of a thread that do
not fit into them; shared memory is that of a program (at most 227 KB); wgmma and mma are the instructions of products
for tensor cores.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from benchmarks.common import OUTPUT, publish, table
from megamem.ops.deep_memory import shared_heads
from megamem.ops.deep_memory.error import OutputNorm
from megamem.ops.deep_memory.group import deep_memory_chunks
from megamem.ops.deep_memory.kept_networks import kept_networks
from megamem.ops.deep_memory.network import InnerRates
from megamem.ops.deep_memory.selected_networks import selected_networks
from megamem.ops.deep_memory.simplex import SimplexNetwork
from megamem.ops.deep_memory.simplex_group import read_group_by
from megamem.ops.deep_memory.triton import launch, launch_kept, launch_selected, launch_simplex
from megamem.ops.deep_memory.triton.kept import answer_kernel, through_matrices_kernel, through_rows_kernel
from megamem.ops.deep_memory.triton.reads import read_kernel, through_reads_kernel
from megamem.ops.deep_memory.triton.selected import (
    answer_pairs_kernel,
    through_pair_matrices_kernel,
    through_pairs_kernel,
)
from megamem.ops.deep_memory.triton.simplex_reads import read_simplex_kernel, through_simplex_reads_kernel
from megamem.ops.deep_memory.triton.simplex_writes import write_simplex_kernel
from megamem.ops.deep_memory.triton.simplex_writes_backward import through_simplex_writes_kernel
from megamem.ops.deep_memory.triton.writes import write_kernel
from megamem.ops.deep_memory.triton.writes_backward import through_writes_kernel

ROWS, HEADS, COUNT, TOKENS, WIDTH, INNER = 4, 16, 16, 64, 96, 384
CAPABILITY = 90
MODELS = ["dla", "titans", "memora", "kept", "kept in fp32"]
KERNELS = {
    "write": write_kernel,
    "read": read_kernel,
    "through_reads": through_reads_kernel,
    "through_writes": through_writes_kernel,
    "write_simplex": write_simplex_kernel,
    "read_simplex": read_simplex_kernel,
    "through_simplex_reads": through_simplex_reads_kernel,
    "through_simplex_writes": through_simplex_writes_kernel,
    "answer": answer_kernel,
    "through_rows": through_rows_kernel,
    "through_matrices": through_matrices_kernel,
    "answer_pairs": answer_pairs_kernel,
    "through_pairs": through_pairs_kernel,
    "through_pair_matrices": through_pair_matrices_kernel,
}


class Absent:
    """The driver of a device that is compiled for and is not there."""

    def get_current_target(self) -> GPUTarget:
        """Return what is compiled for."""
        return GPUTarget("cuda", CAPABILITY, 32)

    def get_current_device(self) -> int:
        """Return the device's number."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return the number of its stream."""
        return device


def train(model: str, precision: launch.Precision) -> None:
    """Call the kernels as training does, with tensors that have no values."""

    def some(*shape: int) -> Tensor:
        return torch.empty(shape, device="meta", requires_grad=True)

    tokens, titans = (ROWS, HEADS, COUNT, TOKENS), model == "titans"
    matrices = (INNER, WIDTH), (WIDTH, INNER)
    added = tuple(some(ROWS, HEADS, *shape) for shape in matrices)
    read, *_ = deep_memory_chunks(
        some(ROWS, HEADS, 1, *tokens[2:], WIDTH), some(*tokens, WIDTH), some(*tokens, WIDTH),
        tuple(some(HEADS, *shape) for shape in matrices), added,
        tuple(map(torch.empty_like, added)) if titans else None,
        InnerRates(some(*tokens), *(some(*tokens) for _ in range(2 * titans))), "l2" if titans else "dot", True,
        OutputNorm(some(HEADS, WIDTH), 1e-5), passes=launch.passes(precision),
    )  # fmt: skip
    read.sum().backward()


def read_kept(dtype: torch.dtype, precision: launch.Precision) -> None:
    """Call the kernels of kept networks as training in a dtype does, with tensors that have no values."""
    kept = 8
    query = torch.empty(ROWS, HEADS, 1, COUNT * TOKENS, WIDTH, device="meta", dtype=dtype, requires_grad=True)
    shares = torch.empty(*query.shape[:-1], kept, device="meta", requires_grad=True)
    matrices = [torch.empty(ROWS, HEADS, kept, INNER, WIDTH, device="meta", requires_grad=True) for _ in range(2)]
    made = kept_networks(query, matrices, shares, 1e-5, passes=launch_kept.kept_passes(precision))
    made.sum().backward()
    made = selected_networks(query, [matrices], shares, 2, 1e-5, launch_selected.selected_passes(precision))
    made.sum().backward()


def train_memora(precision: launch.Precision) -> None:
    """Call Memora's kernels as training does, with tensors that have no values."""
    network = SimplexNetwork(None, True, OutputNorm(torch.empty(HEADS, WIDTH, device="meta", requires_grad=True), 1e-5))
    tokens = [torch.empty(ROWS, HEADS, COUNT, TOKENS, WIDTH, device="meta", requires_grad=True) for _ in range(5)]
    logs = [
        torch.empty(ROWS, HEADS, *size, device="meta", requires_grad=True) for size in ((INNER, WIDTH), (WIDTH, INNER))
    ]
    read, *_ = read_group_by(launch_simplex.simplex_passes(precision))(
        network, tokens[0][:, :, :, None], *tokens[1:], *logs
    )
    read.sum().backward()


def compiled(call: Callable[[], None]) -> dict[str, Any]:
    """Return the kernels that a function calls, compiled and not run."""
    found: dict[str, Any] = {}

    def instead(name: str, run: Callable[..., Any]) -> Callable[..., None]:
        def compile_only(*given: Any, warmup: bool, **named: Any) -> None:
            found[name] = run(*given, warmup=True, **named)

        return compile_only

    for name, kernel in KERNELS.items():
        kernel.run = instead(name, kernel.run)
    try:
        call()
    finally:
        for kernel in KERNELS.values():
            del kernel.run
    return found


def taken(kernel: Any) -> dict[str, int]:
    """Return registers, spilled bytes and shared memory of a compiled kernel, as the assembler reports them."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(kernel.asm["ptx"])
        assembler = [triton.knobs.nvidia.ptxas.path, "-v", f"-arch=sm_{CAPABILITY}a", str(file), "-o", "/dev/null"]
        report = subprocess.run(assembler, check=True, capture_output=True, text=True).stderr

    def number(pattern: str) -> int:
        found = re.search(pattern, report)
        return int(found.group(1)) if found else 0

    return {
        "registers": number(r"Used (\d+) registers"),
        "spilled": number(r"(\d+) bytes spill stores"),
        "shared": kernel.metadata.shared,
        "wgmma": kernel.asm["ptx"].count("wgmma.mma_async"),
        "mma": kernel.asm["ptx"].count("mma.sync"),
    }


def main(arguments: list[str] | None = None) -> None:
    """See the module's documentation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--units", nargs="+", type=int, default=[0])
    parser.add_argument("--warps", nargs="+", type=int, default=[0])
    parser.add_argument("--stages", nargs="+", type=int, default=[launch.STAGES])
    parser.add_argument("--precision", nargs="+", choices=("tf32", "tf32x3", "ieee"), default=["tf32"])
    parser.add_argument("--multiprocessors", type=int, default=132, help="1: no programs share a head")
    parser.add_argument("--output", type=Path, default=OUTPUT / "triton_kernels.json")
    options = parser.parse_args(arguments)
    driver.set_active(Absent())
    # as on a device, where programs that share a head wait for each other
    launch.programs_run_together = lambda _: True
    shared_heads.MULTIPROCESSORS = options.multiprocessors
    found = []
    choices = product(options.models, options.units, options.warps, options.stages, options.precision)
    for model, units, warps, stages, precision in choices:
        launch.STAGES = launch_kept.STAGES = stages
        of_model = launch_kept if model.startswith("kept") else launch
        of_units = launch_kept if model.startswith("kept") else shared_heads
        of_units.UNITS, of_model.WARPS = units or of_units.UNITS, warps or of_model.WARPS
        calls = {
            "kept": partial(read_kept, torch.bfloat16),
            "kept in fp32": partial(read_kept, torch.float32),
            "memora": train_memora,
        }
        call = partial(calls.get(model, partial(train, model)), precision)
        for name, kernel in compiled(call).items():
            setting = {
                "kernel": f"{name}, {model}",
                "units": of_units.UNITS,
                "warps": of_model.WARPS,
                "stages": stages,
                "precision": precision,
            }
            found.append(setting | taken(kernel))
            print(found[-1], flush=True)
    print(
        table(
            list(found[0]),
            [[f"{value:,}" if isinstance(value, int) else value for value in one.values()] for one in found],
        )
    )
    publish({"shape": [TOKENS, WIDTH, INNER], "kernels": found}, options.output)


if __name__ == "__main__":
    main()
