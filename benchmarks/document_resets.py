"""Throughput with memories reset where documents begin, over the same tokens read on without resets, per mechanism.

    python -m benchmarks.document_resets [--quick] [--threads N] [--budget-s S] [--rows 1 4] [--models NAME ...]

Joined documents of log-normal lengths, 1,000 tokens on average, in sequences of 4,096; two layers of each shipped
mechanism, narrow and with a small vocabulary so that the mixers are most of the work; forward and backward of a whole
sequence, FP32, no optimizer. The two forms take turns within one run; ratios are of the same turn, in
processor time, which other processes on the machine do not lengthen (with one thread: waiting threads spin).
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import (
    OUTPUT,
    fix_threads,
    interleaved,
    publish,
    random_batch,
    ratio,
    shipped_model,
    summary,
    table,
    window_run,
)
from megamem.config.load import parse_config, read_yaml
from megamem.config.model import ModelConfig
from megamem.data.batch import Batch
from megamem.model.stage import build_stage
from megamem.parallel.linears import PlainLinears, initialize_parameters

MEAN_TOKENS, SIGMA = 1000, 1.0
"""Mean of the documents' tokens, and the standard deviation of its logarithm."""
SHIPPED = {
    "full attention": "transformer-760m", "sliding attention": "samba-760m",
    "linear attention": "linear-attention-760m", "retnet": "retnet-760m", "delta net": "delta-net-760m",
    "gated delta net": "gated-delta-net-760m",
    "dla": "dla-760m", "titans": "titans-760m", "memora": "memora-760m", "dla, gated segments": "dla-grm-760m",
    "dla, log-linear": "dla-log-linear-760m", "elastic memory": "elastic-100m", "infini-attention": "infini-100m",
    "melodi": "melodi-100m", "memorizing attention": "memorizing-100m",
}  # fmt: skip
GOAL = 0.9
GOAL_FOR = ("full attention", "sliding attention", "linear attention", "retnet", "delta net", "gated delta net")


def mixer_of(name: str) -> dict[str, Any]:
    """Return the mechanism of a shipped model: the mixer of its memory layers, or of all layers."""
    model = read_yaml(shipped_model(name))["model"]
    memory = model.get("memory") or [{"mixer": model.get("mixer", "local_attention")}]
    mixer = memory[0]["mixer"]
    return mixer if isinstance(mixer, dict) else {"kind": mixer}


def models(quick: bool, names: list[str]) -> dict[str, ModelConfig]:
    """Every mechanism in one shape, and local attention."""
    shape = {"layers": 2, "hidden_size": 256, "heads": 4, "vocab_size": 256, "chunk_size": 2048}
    mixers = {
        "local attention": {"kind": "local_attention"},
        **{name: mixer_of(file) for name, file in SHIPPED.items()},
    }
    if quick:
        shape |= {"hidden_size": 64}
        mixers = {name: mixers[name] for name in ("local attention", "retnet")}
    return {
        name: parse_config(ModelConfig, {**shape, "mixer": mixer}, name)
        for name, mixer in mixers.items()
        if not names or name in names
    }


def joined(model: ModelConfig, chunks: int, rows: int, seed: int = 0) -> Batch:
    """Random tokens of documents that begin at any token."""
    generator = np.random.default_rng(seed)
    tokens = chunks * model.chunk_size
    begins = np.zeros((tokens, rows), np.bool_)
    starts = np.zeros((chunks, rows), np.int64)
    for row in range(rows):
        lengths = np.exp(generator.normal(np.log(MEAN_TOKENS) - SIGMA**2 / 2, SIGMA, tokens)).astype(np.int64) + 1
        at = np.concatenate(([0], np.cumsum(lengths)))
        begins[at[at < tokens], row] = True
        borders = np.arange(chunks) * model.chunk_size
        starts[:, row] = borders - at[np.searchsorted(at, borders, side="right") - 1]
    return replace(random_batch(model, chunks, rows, seed), starts=starts, begins=begins)


def measure(model: ModelConfig, rows: int, turns: int, budget_s: float) -> dict[str, Any]:
    """Tokens per second with and without resets, and their ratio."""
    stage, chunks = build_stage(model, PlainLinears()), 2
    initialize_parameters(stage, seed=0)
    exact = joined(model, chunks, rows)
    times = interleaved(
        {"none": window_run(stage, random_batch(model, chunks, rows)), "exact": window_run(stage, exact)},
        turns,
        budget_s,
    )
    tokens = exact.tokens.numel()
    return {
        "documents": int(exact.begins.sum()) if exact.begins is not None else 0,
        "tokens_per_second": {name: summary([tokens / s for s in t.processor])["median"] for name, t in times.items()},
        "exact_over_none": ratio(times["none"].processor, times["exact"].processor),
    }


def main(arguments: list[str] | None = None) -> None:
    """See the module's documentation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny shape: checks that the benchmark runs")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument(
        "--budget-s", type=float, default=30, help="seconds a mechanism may take (one turn always runs)"
    )
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4], help="rows of a micro-batch")
    parser.add_argument(
        "--models", nargs="+", default=[], help="mechanisms by their names in the table; all if not given"
    )
    parser.add_argument("--output", type=Path, default=OUTPUT / "document_resets.json")
    options = parser.parse_args(arguments)
    count = fix_threads(options.threads)
    print(f"torch {torch.__version__}, {count} threads, FP32, load average {os.getloadavg()[0]:.1f}")
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for name, model in models(options.quick, options.models).items():
        rows_of = [1] if options.quick else options.rows
        found[name] = {rows: measure(model, rows, 2 if options.quick else 7, options.budget_s) for rows in rows_of}
        for rows, result in found[name].items():
            print(f"{name}, {rows} rows: {result['exact_over_none']['median']:.3f}", flush=True)
    lines = []
    for name, by_rows in found.items():
        for rows, result in by_rows.items():
            rates, over = result["tokens_per_second"], result["exact_over_none"]
            spread = f"{over['median']:.2f} ({over['low']:.2f}-{over['high']:.2f})"
            lines.append([name, rows, result["documents"], f"{rates['none']:,.0f}", f"{rates['exact']:,.0f}", spread])
    header = ["mechanism", "rows", "documents", "tokens/s, no reset", "tokens/s, exact", "ratio (quartiles)"]
    print("\n" + table(header, lines))
    met = all(
        result["exact_over_none"]["median"] >= GOAL
        for name, by_rows in found.items()
        if name in GOAL_FOR
        for result in by_rows.values()
    )
    publish({"torch": torch.__version__, "threads": count, "goal_met": met, "mechanisms": found}, options.output)


if __name__ == "__main__":
    main()
