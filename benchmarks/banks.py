"""Elastic Memory's matrices at large orders: time and memory to build them, to read them again, to multiply by them.

    python -m benchmarks.banks [--orders 540 1080 2160 4320] [--tokens 32768] [--output runs/benchmarks/banks.json]

Builds all matrices of a context (blocks of 2,048 tokens, 512 samples), each order in a process of its own, twice: with
an empty folder on disk and with the folder that the first left. Then the product P C of one block with 1,440 channels
(the paper's keys and values of two rows) as bands of the triangle over the whole matrix, forward and backward.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from megamem.memory.continuous.hippo_bank import HippoBank, LowerTriangular, MatrixStore

BLOCK, SAMPLES, CHANNELS = 2048, 512, 1440


def build(order: int, tokens: int) -> dict[str, Any]:
    """All matrices of one context, in this process."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    bank = HippoBank(order, BLOCK, SAMPLES, "exponential", 0.0, store=MatrixStore(64 << 30))
    begin = time.perf_counter()
    for start in range(0, tokens, BLOCK):
        bank.update_matrices((start,), torch.device("cpu"))
        bank.reconstruction((start,), torch.device("cpu"))
    seconds = time.perf_counter() - begin
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
    return {"seconds": seconds, "held_gib": bank.store.nbytes / 2**30, "peak_gib": peak}


def product_ratio(order: int, rounds: int = 5) -> float:
    """Time of the banded product over that of the dense one, forward and backward, taken in turn: the median."""
    bank = HippoBank(order, BLOCK, SAMPLES, "uniform", 0.0, store=MatrixStore(64 << 30))
    banded, _ = bank.update_matrices((BLOCK,), torch.device("cpu"))
    dense = LowerTriangular((banded.dense(),))
    state = torch.randn(1, order, CHANNELS, requires_grad=True)
    times: dict[str, list[float]] = {"banded": [], "dense": []}
    for _ in range(rounds + 1):
        for name, matrix in (("banded", banded), ("dense", dense)):
            begin = time.perf_counter()
            (matrix @ state).sum().backward()
            times[name].append(time.perf_counter() - begin)
    return statistics.median(a / b for a, b in list(zip(times["banded"], times["dense"], strict=True))[1:])


def main() -> None:
    """Parse, measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--orders", type=int, nargs="+", default=[540, 1080, 2160, 4320])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--one", choices=["build", "product"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        (order,) = arguments.orders
        found = build(order, arguments.tokens) if arguments.one == "build" else product_ratio(order)
        print(json.dumps(found))
        return
    rows = []
    print("| N | first, s | again, s | held, GiB | peak, GiB | banded over dense product |\n|---|---|---|---|---|---|")
    for order in arguments.orders:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "benchmarks.banks", "--tokens", str(arguments.tokens)]
            first, again, ratio = (
                json.loads(
                    subprocess.run(
                        [*command, "--orders", str(order), "--one", part],
                        check=True,
                        stdout=subprocess.PIPE,
                        env={**os.environ, "MEGAMEM_CACHE": folder},
                    ).stdout
                )
                for part in ("build", "build", "product")
            )
        row = {"order": order, "first": first, "again": again, "banded_over_dense": ratio}
        rows.append(row)
        print(
            f"| {order} | {first['seconds']:.1f} | {again['seconds']:.1f} | {first['held_gib']:.2f} | "
            f"{first['peak_gib']:.2f} | {ratio:.2f} |",
            flush=True,
        )
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
