"""Windows read layer by layer beside windows read chunk by chunk: rounding of BF16 gradients, and time on a CPU.

    python -m benchmarks.window_order [--quick] [--turns N]

Rounding: relative error of gradients in BF16 against float64 with the same weights, means over the matrices of a kind;
two layers of 128, chunks of 64, two rows, Elastic Memory at the second layer. Time: forward and backward of 4,096
tokens, one row, four layers of 256 with Elastic Memory at the third, FP32, one thread; both orders take turns, ratios
are of the same turn, in processor time.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import OUTPUT, fix_threads, interleaved, publish, random_batch, ratio, table, window_run
from megamem.config.load import parse_config
from megamem.config.model import ModelConfig
from megamem.config.training import WindowOrder
from megamem.model.stage import build_stage
from megamem.parallel.linears import PlainLinears, initialize_parameters

ORDERS: tuple[WindowOrder, ...] = ("chunks", "layers")
KINDS = {"MLP": ".mlp.", "head": "head.", "mixer": ".mixer."}
"""Matrices by what their names hold."""


def model_of(layers: int, hidden_size: int, chunk_size: int) -> ModelConfig:
    """A model with Elastic Memory at the last layer but one, or the last of two."""
    memory = [{"layers": [max(1, layers - 2)], "mixer": {"kind": "elastic_memory", "order": 16, "samples": 16}}]
    shape = {"layers": layers, "hidden_size": hidden_size, "heads": 4, "vocab_size": 256, "chunk_size": chunk_size}
    return parse_config(ModelConfig, {**shape, "memory": memory}, "benchmark")


def gradients(model: ModelConfig, chunks: int, order: WindowOrder, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the gradients of all parameters in float64, by name; weights are numbers of BF16 whatever the dtype."""
    stage = build_stage(model, PlainLinears())
    initialize_parameters(stage, seed=1)
    stage = stage.to(torch.bfloat16).to(dtype)
    window_run(stage, random_batch(model, chunks, 2), order)()
    return {name: parameter.grad.double() for name, parameter in stage.named_parameters() if parameter.grad is not None}


def rounding(model: ModelConfig, chunks: int) -> dict[str, dict[str, float]]:
    """Return by order and kind of matrix the mean relative error of gradients in BF16."""
    exact = gradients(model, chunks, "chunks", torch.float64)
    found = {}
    for order in ORDERS:
        rounded = gradients(model, chunks, order, torch.bfloat16)
        errors = {name: float((rounded[name] - exact[name]).norm() / exact[name].norm()) for name in exact}
        found[order] = {
            kind: mean(error for name, error in errors.items() if part in name and exact[name].ndim == 2)
            for kind, part in KINDS.items()
        }
    return found


def over_chunks(model: ModelConfig, tokens: int, turns: int, budget_s: float) -> dict[str, float]:
    """Return the tokens per second of windows read by layer over those read by chunk: median and quartiles."""
    stage = build_stage(model, PlainLinears())
    initialize_parameters(stage, seed=0)
    batch = random_batch(model, tokens // model.chunk_size, 1)
    times = interleaved({order: window_run(stage, batch, order) for order in ORDERS}, turns, budget_s)
    return ratio(times["chunks"].processor, times["layers"].processor)


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module's documentation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny shapes: checks that the benchmark runs")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--output", type=Path, default=OUTPUT / "window_order.json")
    options = parser.parse_args(arguments)
    fix_threads(1)
    width, counts = (32, [2]) if options.quick else (128, [1, 4, 16, 64])
    errors: dict[int, dict[str, dict[str, float]]] = {}
    for chunks in counts:
        errors[chunks] = rounding(model_of(2, width, 16 if options.quick else 64), chunks)
    print("Relative error of gradients in BF16, by chunk and by layer\n")
    rows = [
        [chunks, *(f"{by_order[order][kind]:.2%}" for kind in KINDS for order in ORDERS)]
        for chunks, by_order in errors.items()
    ]
    print(table(["chunks of a window", *(f"{kind}, {order}" for kind in KINDS for order in ORDERS)], rows))

    tokens, sizes = (64, [16]) if options.quick else (4096, [64, 128, 256, 512])
    found: dict[int, Any] = {}
    for size in sizes:
        model = model_of(4, 32 if options.quick else 256, size)
        found[size] = over_chunks(model, tokens, 1 if options.quick else options.turns, 120)
    print("\nTokens/s by layer over by chunk\n")
    spread = [[size, f"{each['median']:.2f} ({each['low']:.2f}-{each['high']:.2f})"] for size, each in found.items()]
    print(table(["chunk", "ratio (quartiles)"], spread))
    publish({"torch": torch.__version__, "gradient_errors": errors, "layers_over_chunks": found}, options.output)


if __name__ == "__main__":
    main()
