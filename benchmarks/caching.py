"""Throughput of recurrent memories and of Memory Caching over them on the CPU: the paper's Figure 4.

    python -m benchmarks.caching [--quick] [--threads N] [--budget-s S] [--lengths 4096 16384]

One shape for all (4 layers of 256, 4 heads, chunks of 512, segments of 256, a vocabulary of 1,024), forward and
backward of a whole sequence, FP32, no optimizer, one window over the sequence. The models take turns within one run;
ratios are of the same turn: over Transformer++ with full attention, and for what keeps segments the time over its own
memory's. Beyond 4,096 tokens every block is computed again in the backward pass, in all models alike, so that a
sequence fits in memory.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import matplotlib
import torch

from benchmarks.common import (
    OUTPUT,
    fix_threads,
    interleaved,
    model_run,
    publish,
    ratio,
    summary,
    table,
)
from benchmarks.cpu import spread
from megamem.config.load import parse_config
from megamem.config.model import ModelConfig
from megamem.config.training import WindowOrder

FULL = "full attention"
BASES: dict[str, dict[str, Any]] = {
    "linear attention": {"kind": "linear_attention"},
    "dla": {"kind": "dla"},
    "titans": {"kind": "titans"},
}
COMBINE = ("residual", "grm", "soup", "ssc")
OTHERS: dict[str, dict[str, Any]] = {
    FULL: {"kind": "full_attention"},
    "retnet": {"kind": "retnet"},
    "delta net": {"kind": "delta_net"},
    "gated delta net": {"kind": "delta_net", "decay": True},
    "memora": {"kind": "memora"},
    "sliding attention": {"kind": "sliding_attention", "window": 1024},
}
GOALS = {"ssc": 1.15, "grm": 1.6}
"""Most time over the base memory's at 4,096 tokens."""
STORED = 4096
"""Tokens up to which activations are kept for the backward pass."""


SHAPE: dict[str, Any] = {"layers": 4, "hidden_size": 256, "heads": 4, "vocab_size": 1024, "chunk_size": 512}
SEGMENT = 256
"""Tokens of the segments that are kept."""


def mixers(segment: int) -> dict[str, dict[str, Any]]:
    """What each model of the comparison has in all layers."""
    found = dict(OTHERS)
    for name, base in BASES.items():
        found[name] = base
        found[f"{name} + log-linear"] = {"kind": "log_linear", "memory": base, "segment": segment}
        for combine in COMBINE:
            kind = {"kind": "memory_caching", "memory": base, "combine": combine}
            found[f"{name} + {combine}"] = {**kind, "segment": segment}
    return found


def models(quick: bool) -> dict[str, ModelConfig]:
    """Every model of the comparison in one shape."""
    shape, segment = SHAPE, SEGMENT
    if quick:
        shape, segment = {**shape, "layers": 1, "hidden_size": 32, "heads": 2, "chunk_size": 64}, 64
    return {name: parse_config(ModelConfig, {**shape, "mixer": mixer}, name) for name, mixer in mixers(segment).items()}


def run_of(model: ModelConfig, tokens: int, order: WindowOrder = "chunks", compiled: bool = False) -> Any:
    """A function that runs one sequence forward and backward."""
    return model_run(model, tokens // model.chunk_size, 1, order, tokens > STORED, compiled)


def base_of(name: str) -> str | None:
    """The memory that a model keeps or merges."""
    return name.split(" + ")[0] if " + " in name else None


def measure(forms: dict[str, ModelConfig], tokens: int, turns: int, budget_s: float) -> dict[str, Any]:
    """Tokens per second, over full attention, and time over the base memory's."""
    runs = {name: run_of(model, tokens) for name, model in forms.items()}
    times = interleaved(runs, turns, budget_s, warmup=tokens <= STORED)  # a warm-up matters to seconds, not to minutes
    wall = {name: measured.wall for name, measured in times.items()}
    bases = {name: base for name in forms if (base := base_of(name)) in forms}
    return {
        "tokens": tokens,
        "turns": len(wall[FULL]),
        "recomputed": tokens > STORED,
        "tokens_per_second": {name: summary([tokens / s for s in seconds]) for name, seconds in wall.items()},
        "over_full": {name: ratio(wall[FULL], wall[name]) for name in forms},
        "cost_over_base": {name: ratio(wall[name], wall[base]) for name, base in bases.items()},
    }


def report(result: dict[str, Any]) -> None:
    """Print a length's table."""
    again = ", blocks computed again in the backward pass" if result["recomputed"] else ""
    print(f"\n### {result['tokens']:,} tokens, {result['turns']} turns{again}\n")
    rows = []
    for name, rate in result["tokens_per_second"].items():
        cost = result["cost_over_base"].get(name)
        goal = GOALS.get(name.rpartition(" + ")[2], "") if result["tokens"] == STORED and cost else ""
        rows.append(
            [name, spread(rate, 0), spread(result["over_full"][name], 2), spread(cost, 2) if cost else "", goal]
        )
    print(table(["model", "tokens/s", "over full attention", "time over the memory alone", "goal"], rows))


def picture(lengths: dict[str, dict[str, Any]], path: Path) -> None:
    """Tokens/s by context length, a panel per base memory."""
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, LogLocator

    figure, axes = pyplot.subplots(1, len(BASES), figsize=(4.6 * len(BASES), 4.2), sharey=True)
    x = [int(length) for length in lengths]
    for axis, base in zip(axes, BASES, strict=True):
        shown = [
            FULL,
            base,
            *(name for name in next(iter(lengths.values()))["cost_over_base"] if base_of(name) == base),
        ]
        for name in shown:
            y = [result["tokens_per_second"][name]["median"] for result in lengths.values()]
            axis.plot(x, y, marker="o", label=name, color="black" if name == FULL else None)
        axis.set(title=base, xlabel="tokens of context", xscale="log", yscale="log", xticks=x)
        axis.set_xticklabels([f"{length // 1024}K" for length in x])
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:,.0f}"))
        axis.minorticks_off()
        axis.legend(fontsize=7)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("tokens/s, forward and backward")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> None:
    """See the module's documentation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny shape: checks that the benchmark runs")
    parser.add_argument("--threads", type=int, help="torch threads; all usable cores if not given")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--budget-s", type=float, default=900, help="seconds a length may take (one turn always runs)")
    parser.add_argument("--output", type=Path, default=OUTPUT / "caching.json")
    options = parser.parse_args(arguments)
    count = fix_threads(options.threads)
    print(f"torch {torch.__version__}, {count} threads, FP32, load average {os.getloadavg()[0]:.1f}")
    found = {}
    for tokens in [128, 256] if options.quick else options.lengths:
        found[str(tokens)] = measure(models(options.quick), tokens, options.turns, options.budget_s)
        report(found[str(tokens)])
    options.output.parent.mkdir(parents=True, exist_ok=True)
    chart = options.output.with_suffix(".png")
    picture(found, chart)
    publish({"torch": torch.__version__, "threads": count, "goals": GOALS, "lengths": found, "picture": str(chart)},
            options.output)  # fmt: skip


if __name__ == "__main__":
    main()
