"""What the roofline predicts of training one device with each 760M model, and what its time is spent on.

    python -m benchmarks.roofline [--models NAME ...] [--device h100] [--rows 4] [--length 4096]
        [--compile] [--triton] [--fla] [--chunk-size TOKENS] [--by-layer]

Forward and backward of one micro-batch, BF16, without the optimizer's update and without other devices. Kernels are
those of a chunk in one layer, both passes. Nothing runs on a device: operations are counted on the CPU
(`megamem/planning/roofline.py`) and timed with the rates of `megamem/planning/devices.yaml`.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common import OUTPUT, ROOT, model_from, publish, table
from megamem.costs.flops import flops_per_token
from megamem.hardware import cores
from megamem.planning.activations import Activations
from megamem.planning.machines import Machine, machine
from megamem.planning.measured_part import Share
from megamem.planning.roofline import PassTime
from megamem.planning.step_time import StageWork, sum_of

MODELS = {path.stem: path for path in sorted((ROOT / "configs/models").glob("*/*-760m.yaml"))}


def predict(
    path: Path, device: Machine, rows: int, length: int, compiled: bool, by_layer: bool, **fields: str | int
) -> dict[str, Any]:
    """Figures of one model, read in sequences of `length` tokens or of one chunk if that is longer.

    by_layer: whether each sequence is a window that is read layer by layer; fields: others of the model.
    """
    model = model_from(path).model_copy(update=fields)
    chunks = max(1, length // model.chunk_size)
    around = "compiled" if compiled else "cuda"
    together = chunks if by_layer else 1
    parts, share = Activations(model, "bf16", chunks, cores(), kernels=around, together=together), Share(rows, 1)
    works = [parts.layer_work(layer, share) for layer in range(model.layers)]
    passes = StageWork(parts, device.reached).stage(range(model.layers), share)
    time = sum_of(each for chunk in passes for each in chunk)
    rate = rows * chunks * model.chunk_size / time.total
    flops = flops_per_token(model, chunks * model.chunk_size)["training"]
    count = sum(len(each.kinds) for layer in works for chunk in layer for each in chunk) / model.layers / chunks
    shares = {name: seconds / time.total for name, seconds in asdict(time).items()}
    return {"kernels": count, "tokens_per_second": rate, "mfu": flops * rate / device.peak("bf16"), "shares": shares}


def main(arguments: list[str] | None = None) -> None:
    """See the module's documentation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME")
    parser.add_argument("--device", default="h100")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--compile", action="store_true", help="with training.compile")
    parser.add_argument("--triton", action="store_true", help="with model.deep_memory_kernel: triton")
    parser.add_argument("--fla", action="store_true", help="with model.recurrence_kernel: fla")
    parser.add_argument("--chunk-size", type=int, help="of the model; its own if not given")
    parser.add_argument("--by-layer", action="store_true", help="with training.window_order: layers")
    parser.add_argument("--output", type=Path, default=OUTPUT / "roofline.json")
    options = parser.parse_args(arguments)
    device = machine(options.device, 1)
    fields: dict[str, str | int] = {
        "deep_memory_kernel": "triton" if options.triton else "torch",
        "recurrence_kernel": "fla" if options.fla else "torch",
    }
    if options.chunk_size:
        fields["chunk_size"] = options.chunk_size
    found = {}
    heads = ["model", "kernels", "tokens/s", "MFU", *asdict(PassTime())]
    for name in options.models:
        one = found[name] = predict(
            MODELS[name], device, options.rows, options.length, options.compile, options.by_layer, **fields
        )
        print(f"{name}: {one['tokens_per_second']:,.0f} tokens/s", flush=True)
    rows = [
        [
            name, f"{one['kernels']:,.0f}", f"{one['tokens_per_second']:,.0f}", f"{one['mfu']:.1%}",
            *(f"{share:.0%}" for share in one["shares"].values()),
        ]
        for name, one in found.items()
    ]  # fmt: skip
    print(f"\n{device.name}, {options.rows} rows of {options.length:,} tokens, predicted\n")
    print(table(heads, rows))
    publish({"device": device.name, "rows": options.rows, "length": options.length, "models": found}, options.output)


if __name__ == "__main__":
    main()
