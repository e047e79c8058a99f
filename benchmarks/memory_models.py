"""Memory models on the CPU: throughput and peak memory beside a transformer that reads its whole context at once.

    python -m benchmarks.memory_models [--quick] [--contexts N ...] [--threads N] [--turns N] [--budget-s S]

One decoder for all (4 layers of 128, 4 heads, a vocabulary of 1,024), FP32, one row. The transformer attends to its
whole context in one chunk. Memory models read chunks of 256 tokens and one memory of each chunk before, which an
encoder of 4 layers of 64 makes; there is a slot for every chunk but the last, in fixed places (empty slots are filled)
or variable ones (left out). Training is forward and backward of a whole sequence, without an optimizer; reading is
`ChunkReader.read` and the losses of all tokens, without gradients. The forms take turns within one run and ratios are
of the same turn, in wall time and in processor time (which other processes do not lengthen; take it with one thread,
since waiting threads spin). Peak memory is what a pass adds to its process, a new one for each figure. Beside ratios
stand those of the FLOPs per token that megamem counts.

The last table is the encoder alone: the chunks of a window side by side (`Stage.prepare`) over one after the other, in
processor time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import OUTPUT, ROOT, fix_threads, interleaved, publish, random_batch, ratio, summary, table
from benchmarks.cpu import Shape, spread, unit
from benchmarks.planned_memory import ALLOCATOR, most_resident
from megamem.config.load import parse_config
from megamem.config.model import ModelConfig
from megamem.costs.flops import flops_per_token
from megamem.memory.base import Chunk
from megamem.model.architectures.memory_model import MemoryModel
from megamem.model.stage import build_stage
from megamem.parallel.linears import PlainLinears, initialize_parameters
from megamem.pipeline.reader import ChunkReader
from megamem.pipeline.train_chunk import chunk_places

TRANSFORMER, FIXED, VARIABLE = "transformer", "memory model, fixed", "memory model, variable"
TRAINING, READING = "training", "reading"
SCORED = 256
"""Tokens whose logits are made at once in reading."""
TOTALS = {TRAINING: "training", READING: "total"}
"""The keys of `flops_per_token`."""


def models(context: int, quick: bool) -> dict[str, ModelConfig]:
    """Every form of the decoder, for sequences of `context` tokens."""
    layers, width, chunk = (2, 32, 32) if quick else (4, 128, 256)
    shape = {"hidden_size": width, "heads": 4, "vocab_size": 64 if quick else 1024, "mixer": "local_attention"}
    encoder = {"layers": layers, "hidden_size": width // 2, "heads": 4}
    architecture = {"kind": "memory_model", "encoder": encoder, "slots": max(context // chunk - 1, 1)}
    forms: dict[str, dict[str, Any]] = {TRANSFORMER: {"layers": layers, "chunk_size": context}}
    for name, positions in ((FIXED, "fixed"), (VARIABLE, "variable")):
        own = {**architecture, "positions": positions}
        forms[name] = {"layers": 2 * layers, "chunk_size": chunk, "architecture": own}
    return {name: parse_config(ModelConfig, {**shape, **form}, "benchmark") for name, form in forms.items()}


def reading(model: ModelConfig, shape: Shape) -> Callable[[], float]:
    """Return a function that reads one sequence without gradients and returns its summed loss."""
    stage = build_stage(model, PlainLinears())
    initialize_parameters(stage, seed=0)
    reader, batch = ChunkReader(stage), random_batch(model, shape.chunks, shape.rows)
    place = Chunk((0,) * shape.rows)

    @torch.inference_mode()
    def run() -> float:
        hidden = reader.read(batch.tokens, place, reader.begin(place))
        assert hidden is not None
        # not all logits at once: what is measured is what the layers need
        parts = zip(hidden.split(SCORED), batch.labels.split(SCORED), strict=True)
        return sum(stage.token_losses(*part).sum().item() for part in parts)

    return run


def passes(model: ModelConfig, context: int, kind: str) -> Callable[[], float]:
    """Return a function that trains on, or reads, one sequence of `context` tokens."""
    shape = Shape(model, context // model.chunk_size, rows=1, turns=0)
    return unit(model, shape)[1] if kind == TRAINING else reading(model, shape)


def added_memory(model: ModelConfig, context: int, kind: str) -> int:
    """Return the bytes that a pass adds at its peak to its process, in which another model has done one before."""
    passes(model, context, kind)()
    run = passes(model, context, kind)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now
    before = most_resident()
    run()
    return most_resident() - before


def peak(name: str, context: int, kind: str, options: argparse.Namespace) -> int:
    """Return `added_memory` of a form in a new process."""
    command = [sys.executable, "-m", "benchmarks.memory_models", "--peak", name, str(context), kind]
    command += [*(["--quick"] if options.quick else []), "--threads", str(torch.get_num_threads())]
    environment = {**os.environ, **ALLOCATOR}
    out = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, env=environment).stdout
    return int(out.splitlines()[-1])


def measure(context: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return rates, ratios over the transformer, counted ones and peaks of all forms, for training and reading."""
    forms, found = models(context, options.quick), {}
    for kind in (TRAINING, READING):
        runs = {name: passes(model, context, kind) for name, model in forms.items()}
        times = interleaved(runs, options.turns, options.budget_s)
        flops = {name: flops_per_token(model, context)[TOTALS[kind]] for name, model in forms.items()}
        peaks = {name: peak(name, context, kind, options) for name in forms}
        found[kind] = {
            "turns": len(times[TRANSFORMER].wall),
            "tokens_per_second": {name: summary([context / s for s in t.wall]) for name, t in times.items()},
            "over_transformer": {name: ratio(times[TRANSFORMER].wall, t.wall) for name, t in times.items()},
            "over_transformer_processor": {
                name: ratio(times[TRANSFORMER].processor, t.processor) for name, t in times.items()
            },
            "flops_per_token": flops,
            "flops_over_transformer": {name: flops[TRANSFORMER] / value for name, value in flops.items()},
            "peak_bytes": peaks,
        }
    return found


def encoder_runs(model: ModelConfig, chunks: int, rows: int) -> dict[str, Callable[[], None]]:
    """Return functions that make the memories of `chunks` chunks in `rows` rows: side by side, or one by one."""
    stage = build_stage(model, PlainLinears())
    assert isinstance(stage, MemoryModel)
    initialize_parameters(stage, seed=0)
    batch, here = random_batch(model, chunks, rows), Chunk((0,) * rows)
    places = chunk_places(batch)

    def side_by_side() -> list[torch.Tensor | None]:
        return [place.prepared for place in stage.prepare(batch.tokens, places)]

    def one_by_one() -> list[torch.Tensor | None]:
        parts = batch.tokens.split(model.chunk_size)
        return [stage.encode(stage.embed_for_encoder(part, here), here)[0] for part in parts]

    def trained(encode: Callable[[], list[torch.Tensor | None]]) -> Callable[[], None]:
        def run() -> None:
            stage.zero_grad(set_to_none=True)
            torch.stack([memories for memories in encode() if memories is not None]).sum().backward()

        return run

    def read(encode: Callable[[], list[torch.Tensor | None]]) -> Callable[[], None]:
        def run() -> None:
            with torch.inference_mode():
                encode()

        return run

    return {
        f"{kind}, {name}": of(encode)
        for kind, of in ((TRAINING, trained), (READING, read))
        for name, encode in (("apart", one_by_one), ("together", side_by_side))
    }


def measure_encoder(chunks: Sequence[int], rows: Sequence[int], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return how much faster memories are made side by side, for each number of chunks and rows."""
    found = []
    for count in chunks:
        model = models(count * (32 if options.quick else 256), options.quick)[FIXED]
        for each in rows:
            times = interleaved(encoder_runs(model, count, each), options.turns, options.budget_s)
            gains = {
                kind: ratio(times[f"{kind}, apart"].processor, times[f"{kind}, together"].processor)
                for kind in (TRAINING, READING)
            }
            found.append({"chunks": count, "rows": each, **gains})
    return found


def report(context: int, result: dict[str, Any]) -> None:
    """Print the tables of `measure`."""
    for kind, found in result.items():
        print(f"\n### {context:,} tokens, {kind}, {found['turns']} turns\n")
        rows = [
            [name, spread(rate, 0), spread(found["over_transformer"][name], 2),
             spread(found["over_transformer_processor"][name], 2),
             f"{found['flops_over_transformer'][name]:.2f}", f"{found['peak_bytes'][name] / 2**20:,.0f}"]
            for name, rate in found["tokens_per_second"].items()
        ]  # fmt: skip
        heads = ["model", "tokens/s", "over the transformer", "in processor time", "its FLOPs would allow", "peak, MiB"]
        print(table(heads, rows), flush=True)


def main(arguments: list[str] | None = None) -> None:
    """See the module's documentation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny shape: checks that the benchmark runs")
    parser.add_argument("--contexts", type=int, nargs="+", help="tokens of a sequence; 1K, 4K and 16K if not given")
    parser.add_argument("--threads", type=int, help="torch threads; all usable cores if not given")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--budget-s", type=float, default=60, help="seconds a table may take (one turn always runs)")
    parser.add_argument("--output", type=Path, default=OUTPUT / "memory_models.json")
    parser.add_argument("--peak", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    count = fix_threads(options.threads)
    if options.peak:
        name, context, kind = options.peak
        print(added_memory(models(int(context), options.quick)[name], int(context), kind))
        return
    print(f"torch {torch.__version__}, {count} threads, FP32, load average {os.getloadavg()[0]:.1f}")
    contexts = options.contexts or ([64] if options.quick else [1024, 4096, 16_384])
    results = {}
    for context in contexts:
        results[str(context)] = measure(context, options)
        report(context, results[str(context)])
    chunks, rows = ((2, 4), (1, 2)) if options.quick else ((4, 16, 64), (1, 4))
    encoder = measure_encoder(chunks, rows, options)
    print("\n### Chunks encoded side by side over one by one\n")
    lines = [
        [each["chunks"], each["rows"], *(spread(each[kind], 2) for kind in (TRAINING, READING))] for each in encoder
    ]
    print(table(["chunks", "rows", TRAINING, READING], lines))
    publish({"torch": torch.__version__, "threads": count, "contexts": results, "encoder": encoder}, options.output)


if __name__ == "__main__":
    main()
