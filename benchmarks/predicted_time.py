"""Seconds of a forward and backward pass, predicted by the planner's roofline, against measured ones on one core.

    python -m benchmarks.predicted_time [--quick] [--turns N] [--budget-s S]

Models of width 256 with four layers, one row of 4,096 tokens, FP32; then other shapes and other ways to run some of
them: windows read layer by layer, several rows, parts computed again. The core's rates are measured before each model,
and all seconds are means over all turns: a core whose speed comes and goes with what others do on the machine is as
slow for one as for the other. The last table says where the planner sees the time
go.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import OUTPUT, fix_threads, interleaved, model_run, publish, summary, table
from megamem.config.load import parse_config
from megamem.config.model import ModelConfig
from megamem.config.training import Recompute, WindowOrder
from megamem.planning.activations import Activations
from megamem.planning.device_rates import SIZES, device_rates
from megamem.planning.measured_part import Share
from megamem.planning.roofline import PassTime, Rates
from megamem.planning.step_time import StageWork, sum_of

DELTA, TITANS = {"kind": "delta_net"}, {"kind": "titans"}
SHAPE = {
    "layers": 4, "hidden_size": 256, "heads": 4, "ffn_size": 704, "vocab_size": 4096, "chunk_size": 1024,
    "tie_embeddings": True,
}  # fmt: skip


@dataclass(frozen=True)
class Way:
    """How a model reads its tokens, where it is not one row, chunk by chunk, with everything kept."""

    rows: int = 1
    order: WindowOrder = "chunks"
    recompute: Recompute = False


PLAIN = Way()
MODELS: dict[str, dict[str, Any]] = {
    "full attention": {"mixer": "full_attention"},
    "local attention": {"mixer": "local_attention"},
    "elastic memory": {"mixer": "elastic_memory"},
    "linear attention": {"mixer": "linear_attention"},
    "RetNet": {"mixer": "retnet"},
    "DeltaNet": {"mixer": DELTA},
    "gated DeltaNet": {"mixer": {**DELTA, "decay": True}},
    "DLA": {"mixer": "dla"},
    "Titans": {"mixer": TITANS},
    "Memora": {"mixer": "memora"},
    "Titans + GRM": {"mixer": {"kind": "memory_caching", "memory": TITANS}},
    "log-linear": {"mixer": {"kind": "log_linear", "memory": {"kind": "linear_attention"}}},
    "elastic memory, chunks of 256": {"mixer": "elastic_memory", "chunk_size": 256},
    "local attention, width 512": {"mixer": "local_attention", "hidden_size": 512, "ffn_size": 1408, "heads": 8},
}
"""Models that read as `PLAIN` says."""
OTHER_WAYS: dict[str, tuple[dict[str, Any], Way]] = {
    "elastic memory, chunks of 256, by layer": ({"mixer": "elastic_memory", "chunk_size": 256}, Way(order="layers")),
    "gated DeltaNet, by layer": ({"mixer": {**DELTA, "decay": True}}, Way(order="layers")),
    "linear attention, four rows": ({"mixer": "linear_attention"}, Way(rows=4)),
    "DLA, layers computed again": ({"mixer": "dla"}, Way(recompute=True)),
    "Titans, mixers computed again": ({"mixer": TITANS}, Way(recompute="mixer")),
    "full attention, MLPs computed again": ({"mixer": "full_attention"}, Way(recompute="mlp")),
}
CASES = {**{name: (model, PLAIN) for name, model in MODELS.items()}, **OTHER_WAYS}
SECONDS = ("launch", "view", "half_rate_side")
"""Measured numbers of a core that are larger where it is slower; of all others the seconds of one are averaged."""
PER_SECOND = ("attention", "attention_backward", "memory", "functions")


def predicted(model: ModelConfig, chunks: int, way: Way, rates: Rates) -> PassTime:
    """The time of a forward and backward pass over sequences of so many chunks."""
    together = chunks if way.order == "layers" else 1
    work = StageWork(Activations(model, "fp32", chunks, together=together), rates)
    passes = work.stage(range(model.layers), Share(way.rows, 1, way.recompute))
    return sum_of(time for chunk in passes for time in chunk)


def average(found: Sequence[Rates]) -> Rates:
    """Rates of a core that takes the mean of the seconds that those take."""
    trees = [rates.model_dump() for rates in found]
    middle = {name: statistics.fmean(tree[name] for tree in trees) for name in SECONDS}
    middle |= {name: statistics.harmonic_mean([tree[name] for tree in trees]) for name in PER_SECOND}
    products = {name: statistics.harmonic_mean([tree["matmul"][name] for tree in trees]) for name in trees[0]["matmul"]}
    return Rates.model_validate({**trees[0], **middle, "matmul": products})


def measure(models: dict[str, ModelConfig], tokens: int, turns: int, budget_s: float) -> tuple[Rates, dict[str, Any]]:
    """The core's rates, and seconds of each model both ways; tokens: of all rows together."""
    ways = {name: CASES[name][1] for name in models}
    chunks = {name: tokens // model.chunk_size // ways[name].rows for name, model in models.items()}
    measured: list[Rates] = []
    runs: dict[str, Callable[[], object]] = {}
    for name, model in models.items():
        runs[f"rates before {name}"] = lambda: measured.append(device_rates(torch.device("cpu"), SIZES["cpu"]))
        way = ways[name]
        runs[name] = model_run(model, chunks[name], way.rows, way.order, way.recompute)
    times = interleaved(runs, turns, budget_s)
    rates = average(measured)
    found = {}
    for name, model in models.items():
        plan = predicted(model, chunks[name], ways[name], rates)
        # what other processes take is not in a process's own time
        seconds = times[name].processor
        found[name] = {
            "measured": {"mean": statistics.fmean(seconds), **summary(seconds)},
            "predicted": plan.total,
            "over_measured": plan.total / statistics.fmean(seconds),
            "parts": asdict(plan),
        }
    return rates, found


def report(found: dict[str, Any]) -> None:
    """Print both tables."""
    rows = [
        [name, f"{one['measured']['mean']:.3f}", f"{one['predicted']:.3f}", f"{one['over_measured'] - 1:+.0%}"]
        for name, one in found.items()
    ]
    print(table(["model", "measured s", "predicted s", "difference"], rows))
    parts = list(next(iter(found.values()))["parts"])
    shares = [
        [name, *(f"{one['parts'][part] / one['predicted']:.0%}" for part in parts)] for name, one in found.items()
    ]
    print()
    print(table(["predicted share", *parts], shares))


def main(arguments: list[str] | None = None) -> None:
    """See the module's documentation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny shape: checks that the benchmark runs")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="MODEL")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--budget-s", type=float, default=600, help="seconds it may take (one turn always runs)")
    parser.add_argument("--output", type=Path, default=OUTPUT / "predicted_time.json")
    options = parser.parse_args(arguments)
    fix_threads(1)
    small = {"hidden_size": 32, "ffn_size": 64, "chunk_size": 256, "vocab_size": 64} if options.quick else {}
    models = {name: parse_config(ModelConfig, {**SHAPE, **CASES[name][0], **small}, name) for name in options.only}
    rates, found = measure(models, 1024 if options.quick else 4096, options.turns, options.budget_s)
    report(found)
    publish({"rates": rates.model_dump(), "models": found}, options.output)


if __name__ == "__main__":
    main()
