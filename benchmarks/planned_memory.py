"""Planned against measured memory: real layouts on the CPU, a process per rank.

    python -m benchmarks.planned_memory [NAME ...]

Each layout trains two steps on random tokens. Measured is the most that a rank's process has ever had resident
(`VmHWM`), from its start to the end of the second step, less the same layout's with a model of one narrow layer for
each stage: the baseline, which is interpreter, libraries and process groups. Planned is what `megamem plan` says.

The allocator is told to give memory back when it is freed, so that resident means in use.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import OUTPUT, publish, table
from benchmarks.ranks import report, run_ranks
from megamem.config.load import parse_config
from megamem.config.run import RunConfig
from megamem.pipeline.balancing import place
from megamem.planning.activations import Activations
from megamem.planning.plan import rank_reports
from megamem.planning.step_time import Layout

ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
STEPS = 2
CACHING = {"kind": "memory_caching", "segment": 256, "combine": "grm", "memory": {"kind": "titans"}}
SELECTIVE = {"kind": "memory_caching", "segment": 256, "combine": "ssc", "top_k": 4, "memory": {"kind": "dla"}}


RISING = {"kind": "melodi", "form": "rising", "summaries": 64}
RECURRENT: dict[str, Any] = {"architecture": {"kind": "recurrent_memory", "memory_tokens": 32}}
ELASTIC = {"kind": "elastic_memory", "order": 256}
# it keeps shares of attention of each head, which take as many bytes in a narrow layer: the baseline has short chunks
LAMEMO: dict[str, Any] = {"mixer": "lamemo", "baseline": {"chunk_size": 16}}
BF16: dict[str, Any] = {
    # a table of positions makes bytes without operations: BF16 products are slow on most CPUs
    "model": {"layers": 2, "positions": "learned", "max_positions": 131_072, "chunk_size": 64},
    "training": {"precision": "bf16"},
    "tokens": 128,
}


@dataclass(frozen=True)
class Case:
    """A run that is planned and measured."""

    world: int = 1
    mixer: Any = "local_attention"
    model: dict[str, Any] = field(default_factory=dict)
    parallel: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    tokens: int = 1024
    """Of a sequence."""
    baseline: dict[str, Any] = field(default_factory=dict)
    """What the baseline's model has otherwise besides."""

    def config(self, small: bool = False) -> RunConfig:
        """small: the baseline's, one narrow layer on each stage."""
        parallel = {"zero_stage": 0, "device": "cpu", **self.parallel}
        training = {"micro_batch_size": 1, "precision": "fp32", **self.training}
        model = {
            "layers": 8, "hidden_size": 512, "heads": 8, "vocab_size": 16_384, "chunk_size": 256, "mixer": self.mixer,
            **self.model,
        }  # fmt: skip
        tokens = self.tokens
        if small:
            layers, heads = parallel.get("pp", 1), model["heads"]
            model |= {"layers": layers, "hidden_size": 8 * heads, "vocab_size": 1024, **self.baseline}
            tokens = model["chunk_size"] * training.get("bptt_chunks", 2)
            model |= {"max_positions": 1024} if "max_positions" in model else {}
        ranks = self.world // parallel.get("tp", 1) // parallel.get("pp", 1)
        sequences = 2 * ranks * training["micro_batch_size"]  # the second is read while the first's gradients are there
        given = {
            "name": "planned",
            "model": model,
            "data": {"sources": ["none"], "sequence_length": tokens},
            "training": {"steps": STEPS, "batch_tokens": sequences * tokens, **training},
            "parallel": parallel,
        }
        return parse_config(RunConfig, given, "layout")


LAYOUTS = {
    "one rank": Case(training={"micro_batch_size": 2}),
    "recompute": Case(training={"recompute": True, "micro_batch_size": 4}, model={"layers": 12}),
    "recompute mixer": Case(training={"recompute": "mixer", "micro_batch_size": 4}, model={"layers": 12}),
    "windows of 2 chunks": Case(training={"bptt_chunks": 2, "micro_batch_size": 3}),
    "PP 2": Case(2, parallel={"pp": 2}, training={"micro_batch_size": 3}),
    "PP 2, windows of 2 chunks": Case(2, parallel={"pp": 2}, training={"bptt_chunks": 2, "micro_batch_size": 5}),
    "PP 4": Case(4, parallel={"pp": 4}, training={"micro_batch_size": 4}),
    "TP 2": Case(2, parallel={"tp": 2}, training={"micro_batch_size": 3}),
    "TP 2, sequence parallel": Case(2, parallel={"tp": 2, "sequence_parallel": True}, training={"micro_batch_size": 3}),
    "PP 2 x TP 2": Case(4, parallel={"pp": 2, "tp": 2}, training={"micro_batch_size": 5}),
    "ZeRO 1, DP 2": Case(2, parallel={"zero_stage": 1}, training={"micro_batch_size": 2}),
    "ZeRO 2, DP 2": Case(2, parallel={"zero_stage": 2}, training={"micro_batch_size": 2}),
    "ZeRO 3, DP 2": Case(2, parallel={"zero_stage": 3}, training={"micro_batch_size": 2}),
    "ZeRO 1, PP 2 x DP 2": Case(4, parallel={"pp": 2, "zero_stage": 1}, training={"micro_batch_size": 4}),
    "full attention": Case(mixer="full_attention", training={"micro_batch_size": 2}),
    "Elastic Memory": Case(mixer=ELASTIC, training={"micro_batch_size": 2}),
    "Memorizing attention": Case(mixer="memorizing_attention", training={"micro_batch_size": 2}),
    "Melodi, rising": Case(mixer=RISING, training={"micro_batch_size": 2}),
    "Melodi, rising, PP 2": Case(2, mixer=RISING, parallel={"pp": 2}, training={"micro_batch_size": 3}),
    "LaMemo": Case(training={"micro_batch_size": 2}, **LAMEMO),
    "LaMemo, PP 2": Case(2, parallel={"pp": 2}, training={"micro_batch_size": 3}, **LAMEMO),
    "LaMemo, PP 4": Case(4, parallel={"pp": 4}, training={"micro_batch_size": 4}, **LAMEMO),
    "Recurrent Memory": Case(model=RECURRENT, training={"micro_batch_size": 2}),
    "Recurrent Memory, PP 2": Case(2, model=RECURRENT, parallel={"pp": 2}, training={"micro_batch_size": 2}),
    "Titans + GRM": Case(mixer=CACHING),
    "Titans + GRM, TP 2": Case(2, mixer=CACHING, parallel={"tp": 2}),
    "DLA + SSC": Case(mixer=SELECTIVE),
    "BF16, ZeRO 1": Case(parallel={"zero_stage": 1}, **BF16),
    "BF16, ZeRO 1, PP 2": Case(2, parallel={"zero_stage": 1, "pp": 2}, **BF16),
    "BF16, ZeRO 2, DP 2": Case(2, parallel={"zero_stage": 2}, **BF16),
}


def most_resident() -> int:
    """Bytes that this process has had resident at most (`ru_maxrss` would count what started it too)."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def run_rank(config: RunConfig) -> None:
    """One rank's steps; prints what the process took."""
    import torch

    from megamem.pipeline.engine import build_engine
    from megamem.training.build import start_topology
    from megamem.training.dry_run import mock_batches

    torch.set_num_threads(1)
    topology = start_topology(config)
    engine = build_engine(config, topology)
    for _ in range(STEPS):
        engine.step(mock_batches(config, topology), config.optimizer.lr)
    report({"rank": topology.rank, "stage": topology.pp_rank, "bytes": most_resident()})


def measure(name: str, small: bool) -> list[dict[str, Any]]:
    """Measure every rank of a layout, each a new process."""
    arguments = ["--rank", name, *(["--small"] if small else [])]
    return run_ranks("benchmarks.planned_memory", arguments, LAYOUTS[name].world, ALLOCATOR)


def compare(name: str) -> list[dict[str, Any]]:
    """Planned and measured bytes of every rank of a layout."""
    config = LAYOUTS[name].config()
    dp_size = LAYOUTS[name].world // config.parallel.pp // config.parallel.tp
    found = Activations.of_run(config, device="cpu")
    planned = [rank.total for rank in rank_reports(Layout(config, dp_size, tuple(place(config))), found)]
    baseline = {rank["rank"]: rank["bytes"] for rank in measure(name, small=True)}
    records = []
    for rank in measure(name, small=False):
        base, plan = baseline[rank["rank"]], planned[rank["stage"]]
        records.append(
            {
                "layout": name,
                "rank": rank["rank"],
                "baseline": base,
                "planned": round(plan),
                "measured": rank["bytes"],
                "error": (plan + base) / rank["bytes"] - 1,
                "error_above_baseline": plan / (rank["bytes"] - base) - 1,
            }
        )
    return records


def main() -> None:
    """Measure all layouts, or those named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=", ".join(LAYOUTS))
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--small", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        run_rank(LAYOUTS[options.rank].config(options.small))
        return
    records: list[dict[str, Any]] = []
    for name in options.names or LAYOUTS:
        records += compare(name)
        print(f"{name}: {records[-1]['error']:+.1%}", file=sys.stderr, flush=True)
    columns = ["layout", "rank", "baseline", "planned", "measured", "planned + baseline", "planned above baseline"]
    rows = [
        [
            record["layout"],
            record["rank"],
            *(f"{record[part] / 2**30:.2f}" for part in ("baseline", "planned", "measured")),
            f"{record['error']:+.1%}",
            f"{record['error_above_baseline']:+.1%}",
        ]
        for record in records
    ]
    print(table(columns, rows))
    publish({"layouts": records}, OUTPUT / "planned_memory.json")


if __name__ == "__main__":
    main()
