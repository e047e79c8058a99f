"""Throughput of every mechanism of the Elastic Memory comparison on the CPU: the paper's speed table.

    python -m benchmarks.mechanisms [--reading] [--quick] [--threads N] [--budget-s S]

One shape for all (12 layers of 720, 8 heads, 8 chunks of 512, memories of the paper's "1x"), forward and backward of a
whole sequence, or with `--reading` forward without gradients; FP32, no optimizer. The models take turns within one
run; ratios are of the same turn. Two references: attention local to the chunk at every layer, and full attention over
the same 4,096 tokens. Beside them stands what the paper's figures give (A800, 32,768 tokens, blocks of 2,048). A
profile per mechanism says where the time goes.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch

from benchmarks.charts import beside
from benchmarks.common import (
    OUTPUT,
    fix_threads,
    interleaved,
    model_from,
    publish,
    ratio,
    shipped_model,
    summary,
    table,
    without_memory,
)
from benchmarks.cpu import Shape, spread, unit
from benchmarks.profiling import profile_table, seconds_by_part
from megamem.config.model import ModelConfig

LOCAL, FULL = "chunk-local attention", "full attention"
GOALS = {"elastic": 0.95, "memorizing": 0.95, "infini": 0.85, "melodi": 0.75}
PAPER = {LOCAL: 1.000, "memorizing": 1.079, "infini": 0.637, "melodi": 0.548, "elastic": 1.057}
"""Its Table 8, column 1x: throughput of training over Transformer++."""
PAPER_READING = {LOCAL: 1.000, "memorizing": 1.064, "infini": 0.968, "melodi": 0.894, "elastic": 1.046}
"""The same of reading, from the samples a second of its Table 11."""


def models(quick: bool) -> dict[str, ModelConfig]:
    """Every mechanism in one shape, and the two references."""
    changes: dict[str, Any] = {"chunk_size": 512, "vocab_size": 4096}
    if quick:
        changes = {"chunk_size": 64, "vocab_size": 64, "layers": 9, "hidden_size": 64, "ffn_size": 64}
    found = {name: model_from(shipped_model(f"{name}-100m"), **changes) for name in GOALS}
    plain = without_memory(found["elastic"])
    return {**found, LOCAL: plain, FULL: without_memory(plain, "full_attention")}


def measure(forms: dict[str, ModelConfig], chunks: int, turns: int, budget_s: float, reading: bool) -> dict[str, Any]:
    """Tokens per second, ratios to both references, and profiles; `reading`: without gradients."""
    shape = Shape(forms[LOCAL], chunks, 1, turns)
    units = {name: unit(model, shape, learns=not reading) for name, model in forms.items()}
    times = interleaved({name: run for name, (_, run) in units.items()}, turns, budget_s)
    wall = {name: measured.wall for name, measured in times.items()}
    return {
        "tokens": shape.tokens,
        "turns": len(wall[LOCAL]),
        "tokens_per_second": {name: summary([shape.tokens / s for s in seconds]) for name, seconds in wall.items()},
        "over_local": {name: ratio(wall[LOCAL], wall[name]) for name in forms},
        "over_local_processor": {name: ratio(times[LOCAL].processor, times[name].processor) for name in forms},
        "over_full": {name: ratio(wall[FULL], wall[name]) for name in forms},
        "profile_seconds": {name: seconds_by_part(*units[name], passes=1) for name in (*GOALS, LOCAL)},
    }


def report(result: dict[str, Any], goals: dict[str, float], paper: dict[str, float]) -> None:
    """Print the tables."""
    print(f"\n{result['tokens']:,} tokens a pass, {result['turns']} turns\n")
    rows = []
    for name, rate in result["tokens_per_second"].items():
        published = f"{paper[name]:.2f}" if name in paper else ""
        over = [spread(result[key][name], 3) for key in ("over_local", "over_local_processor", "over_full")]
        rows.append([name, spread(rate, 0), *over, str(goals.get(name, "")), published])
    heads = ["model", "tokens/s", "over chunk-local", "in processor time", "over full", "goal", "paper"]
    print(table(heads, rows))
    names = [*GOALS, LOCAL]
    print("\nshare of a profiled pass:\n")
    print(table(["part", *names], profile_table(result["profile_seconds"])))


def main(arguments: list[str] | None = None) -> None:
    """See the module's documentation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny shape: checks that the benchmark runs")
    parser.add_argument(
        "--reading", action="store_true", help="without gradients: the paper's Table 11, not its Table 8"
    )
    parser.add_argument("--threads", type=int, help="torch threads; all usable cores if not given")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--budget-s", type=float, default=600, help="seconds it may take (one turn always runs)")
    parser.add_argument("--output", type=Path, default=OUTPUT / "mechanisms.json")
    options = parser.parse_args(arguments)
    count = fix_threads(options.threads)
    print(f"torch {torch.__version__}, {count} threads, FP32, load average {os.getloadavg()[0]:.1f}")
    result = measure(
        models(options.quick), 2 if options.quick else 8, 2 if options.quick else options.turns, options.budget_s,
        options.reading,
    )  # fmt: skip
    goals, paper = ({}, PAPER_READING) if options.reading else (GOALS, PAPER)
    report(result, goals, paper)
    met = {name: result["over_local"][name]["median"] >= goal for name, goal in goals.items()}
    picture = options.output.with_suffix(".png")
    medians = {key: {n: r["median"] for n, r in result[key].items()} for key in ("over_local", "over_full")}
    series = {"over chunk-local attention": medians["over_local"], "over full attention": medians["over_full"]}
    title = "Throughput of reading" if options.reading else "Throughput of training"
    beside(picture, title, "ratio", {**series, **({"goal": goals} if goals else {}), "paper": paper})
    record = {"torch": torch.__version__, "threads": count, "goals": goals, "met": met, "picture": str(picture)}
    publish({**record, **result}, options.output)


if __name__ == "__main__":
    main()
