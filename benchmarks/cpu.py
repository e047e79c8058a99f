"""Throughput on the CPU: Elastic Memory over plain chunk-local attention, forward and backward, same shape.

    python -m benchmarks.cpu [--quick] [--threads N] [--budget-s S] [--shapes books paper]

Each shape is measured with Elastic Memory at one layer and with attention local to the chunk at every layer, in turns
within one run; ratios are of the same turn, and their median and quartiles are printed, in wall time and in processor
time (which other processes on the machine do not lengthen; take it with one thread, since waiting threads spin). Full
attention over the same tokens is measured once, for reference. One unit of work is a whole sequence, one backward pass
over all of its chunks, FP32, no optimizer. A profile (the fastest of some units) says where the time goes.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import (
    OUTPUT,
    ROOT,
    fix_threads,
    interleaved,
    model_from,
    publish,
    random_batch,
    ratio,
    shipped_model,
    summary,
    table,
    without_memory,
)
from benchmarks.profiling import profile_table, seconds_by_part
from megamem.config.model import ModelConfig
from megamem.model.objectives.next_token import NextToken
from megamem.model.stage import Stage, build_stage
from megamem.parallel.linears import PlainLinears, initialize_parameters
from megamem.pipeline.train_chunk import chunk_places
from megamem.pipeline.window import Window

GOAL = 0.9
ELASTIC, LOCAL, FULL = "elastic memory", "chunk-local attention", "full attention"


@dataclass(frozen=True)
class Shape:
    """A model with Elastic Memory at one layer, and how much of a sequence it reads at once."""

    model: ModelConfig
    chunks: int
    rows: int
    turns: int
    profiles: int = 3

    @property
    def tokens(self) -> int:
        """Tokens of one unit of work."""
        return self.chunks * self.model.chunk_size * self.rows


def shapes(quick: bool) -> dict[str, Shape]:
    """Return the shapes: that of configs/recipes/books.yaml, and the paper's 100M layers with chunks of 512.

    The vocabulary is so small that the head hides little.
    """
    books = model_from(ROOT / "configs/recipes/books.yaml")
    if quick:
        tiny = {"layers": 3, "hidden_size": 32, "heads": 2, "vocab_size": 64, "chunk_size": 16}
        memory = [{"layers": [1], "mixer": {"kind": "elastic_memory", "order": 8}}]
        return {"quick": Shape(model_from(ROOT / "configs/recipes/books.yaml", **tiny, memory=memory), 4, 1, 2)}
    paper = model_from(shipped_model("elastic-100m"), chunk_size=512, vocab_size=4096)
    return {"books": Shape(books, 8, 4, 11), "paper": Shape(paper, 8, 1, 5, profiles=1)}


def unit(model: ModelConfig, shape: Shape, learns: bool = True) -> tuple[Stage, Callable[[], float]]:
    """The model, and a function that reads one sequence and returns the loss per token.

    learns: backward too; else nothing is kept for gradients.
    """
    stage = build_stage(model, PlainLinears())
    initialize_parameters(stage, seed=0)
    window = Window(stage, NextToken(stage.config))
    batch = random_batch(model, shape.chunks, shape.rows)
    scale = torch.tensor(1.0 / shape.tokens)

    def run() -> float:
        stage.zero_grad(set_to_none=True)
        states = stage.initial_states(shape.rows, torch.device("cpu"), torch.float32)
        with torch.set_grad_enabled(learns):
            loss, _, _ = window(batch.tokens, batch.labels, chunk_places(batch), states, scale)
        if learns:
            loss.backward()
        return loss.item()

    return stage, run


def measure(shape: Shape, budget_s: float) -> dict[str, Any]:
    """Tokens per second of the three forms, their ratios, and profiles."""
    models = {
        ELASTIC: shape.model,
        LOCAL: without_memory(shape.model),
        FULL: without_memory(shape.model, "full_attention"),
    }
    units = {name: unit(model, shape) for name, model in models.items()}
    times = interleaved({name: units[name][1] for name in (ELASTIC, LOCAL)}, shape.turns, budget_s)
    full = interleaved({FULL: units[FULL][1]}, 1, warmup=False)[FULL]
    seconds = {**{name: measured.wall for name, measured in times.items()}, FULL: full.wall}
    local = summary(seconds[LOCAL])["median"]
    profiles = {name: seconds_by_part(*units[name], passes=shape.profiles) for name in (ELASTIC, LOCAL)}
    return {
        "tokens": shape.tokens,
        "chunk_size": shape.model.chunk_size,
        "chunks": shape.chunks,
        "turns": len(seconds[LOCAL]),
        "tokens_per_second": {name: summary([shape.tokens / s for s in times]) for name, times in seconds.items()},
        "over_local": {
            ELASTIC: ratio(seconds[LOCAL], seconds[ELASTIC]),
            FULL: summary([local / seconds[FULL][0]]),
        },
        "elastic_over_local_processor": ratio(times[LOCAL].processor, times[ELASTIC].processor),
        "profile_seconds": profiles,
    }


def spread(values: dict[str, float], digits: int) -> str:
    """`median (quartile-quartile)`."""
    median, low, high = (f"{values[key]:,.{digits}f}" for key in ("median", "low", "high"))
    return f"{median} ({low}-{high})"


def report(name: str, result: dict[str, Any]) -> None:
    """Print a shape's tables."""
    print(
        f"\n### {name}: {result['chunks']} chunks of {result['chunk_size']}, {result['tokens']:,} tokens a pass, "
        f"{result['turns']} turns\n"
    )
    rows = []
    for form, rate in result["tokens_per_second"].items():
        over = result["over_local"].get(form)
        rows.append([form, spread(rate, 0), "1" if over is None else spread(over, 3)])
    print(table(["model", "tokens/s, median (quartiles)", "over chunk-local"], rows))
    processor = spread(result["elastic_over_local_processor"], 3)
    print(f"\nelastic memory over chunk-local attention in processor time: {processor}")
    print("\nshare of a profiled pass:\n")
    print(table(["part", ELASTIC, LOCAL], profile_table(result["profile_seconds"])))


def main(arguments: list[str] | None = None) -> None:
    """See the module's documentation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny shape: checks that the benchmark runs")
    parser.add_argument("--shapes", nargs="+", choices=["books", "paper"], help="all if not given")
    parser.add_argument("--threads", type=int, help="torch threads; all usable cores if not given")
    parser.add_argument("--budget-s", type=float, default=240, help="seconds a shape may take (one turn always runs)")
    parser.add_argument("--output", type=Path, default=OUTPUT / "cpu.json")
    options = parser.parse_args(arguments)
    count = fix_threads(options.threads)
    print(f"torch {torch.__version__}, {count} threads, FP32, load average {os.getloadavg()[0]:.1f}")
    record: dict[str, Any] = {"torch": torch.__version__, "threads": count, "goal": GOAL, "shapes": {}}
    for name, shape in shapes(options.quick).items():
        if options.shapes and not options.quick and name not in options.shapes:
            continue
        result = measure(shape, options.budget_s)
        report(name, result)
        record["shapes"][name] = result
    record["elastic_over_local"] = {
        name: result["over_local"][ELASTIC]["median"] for name, result in record["shapes"].items()
    }
    record["goal_met"] = all(value >= GOAL for value in record["elastic_over_local"].values())
    publish(record, options.output)


if __name__ == "__main__":
    main()
