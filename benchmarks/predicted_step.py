"""Predicted against measured time of whole optimizer steps, of layouts of two ranks on this machine's CPU.

    python -m benchmarks.predicted_step [--only CASE ...] [--steps 3]

Each rank is a process on a core of its own; both cores must be free. Every case measures the rates of a core while the
other measures too, and what an all-reduce between them reaches; `megamem plan` gets these numbers, and its seconds are
set beside those of real steps, optimizer and gradient sums included. Seconds are those of the clock: ranks wait for
each other.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import OUTPUT, publish, table
from benchmarks.predicted_time import average
from benchmarks.ranks import report, run_ranks
from megamem.config.load import parse_config
from megamem.config.run import RunConfig
from megamem.planning.machines import ACHIEVED, Machine, machine
from megamem.planning.plan import make_plan
from megamem.planning.roofline import Rates

SHAPE = {"layers": 4, "hidden_size": 256, "heads": 4, "ffn_size": 704, "vocab_size": 1024, "chunk_size": 512}
ELASTIC = {"kind": "elastic_memory", "order": 128}
DELTA = {"kind": "delta_net", "decay": True}
WORK = 768
"""Rows and columns of the product between two all-reduces: some milliseconds."""
MESSAGE, FEW = 2**23, 512
"""Numbers in FP32 of the all-reduces that are measured: of the larger one bytes take most of the time."""


@dataclass(frozen=True)
class Case:
    """A run of two ranks, or of one."""

    mixer: Any
    parallel: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    world: int = 2

    @property
    def config(self) -> RunConfig:
        """The configuration: steps of four sequences of 2,048 tokens."""
        given = {
            "name": "step",
            "model": {**SHAPE, "mixer": self.mixer},
            "data": {"sources": ["none"], "sequence_length": 2048},
            "training": {
                "steps": 100, "batch_tokens": 4 * 2048, "micro_batch_size": 1, "precision": "fp32", **self.training
            },
            "parallel": {"zero_stage": 0, "device": "cpu", **self.parallel},
        }  # fmt: skip
        return parse_config(RunConfig, given, "case")


CASES = {
    "local attention, one rank": Case("local_attention", world=1),
    "local attention, DP 2": Case("local_attention"),
    "local attention, ZeRO 1, DP 2": Case("local_attention", {"zero_stage": 1}),
    "local attention, TP 2": Case("local_attention", {"tp": 2}),
    "local attention, TP 2, sequence parallel": Case("local_attention", {"tp": 2, "sequence_parallel": True}),
    "local attention, PP 2": Case("local_attention", {"pp": 2}),
    "local attention, PP 2, windows of 2 chunks": Case("local_attention", {"pp": 2}, {"bptt_chunks": 2}),
    "elastic memory, TP 2": Case(ELASTIC, {"tp": 2}),
    "elastic memory, PP 2, layers computed again": Case(ELASTIC, {"pp": 2}, {"recompute": True}),
    "gated DeltaNet, PP 2": Case(DELTA, {"pp": 2}),
    "gated DeltaNet, ZeRO 1, DP 2, by layer": Case(DELTA, {"zero_stage": 1}, {"window_order": "layers"}),
    "DLA, PP 2": Case("dla", {"pp": 2}),
    "Titans, TP 2": Case("titans", {"tp": 2}),
}


def run_rank(case: Case, steps: int) -> None:
    """One rank: measures its core and the link, then steps; prints what it found."""
    import torch
    import torch.distributed as dist

    from megamem.pipeline.engine import build_engine
    from megamem.planning.device_rates import SIZES, device_rates
    from megamem.training.build import start_topology
    from megamem.training.dry_run import mock_batches

    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[int(os.environ["RANK"])]})
    torch.set_num_threads(1)
    config = case.config
    topology = start_topology(config)
    engine = build_engine(config, topology)
    engine.step(mock_batches(config, topology), config.optimizer.lr)
    dist.barrier()
    rates = [device_rates(torch.device("cpu"), SIZES["cpu"])]
    latency = _all_reduce_seconds(FEW) if case.world > 1 else 0.0
    link = 4 * MESSAGE / (_all_reduce_seconds(MESSAGE) - latency) if case.world > 1 else 1e10
    seconds = []
    for _ in range(steps):
        batches = mock_batches(config, topology)
        dist.barrier()
        begin = time.perf_counter()
        engine.step(batches, config.optimizer.lr)
        dist.barrier()
        seconds.append(time.perf_counter() - begin)
    rates.append(device_rates(torch.device("cpu"), SIZES["cpu"]))
    report({"rates": average(rates).model_dump(), "link": link, "latency": latency, "seconds": seconds})


def _all_reduce_seconds(count: int) -> float:
    """Mean seconds of an all-reduce of so many numbers, each after a product, as in a layer.

    Between pieces of work a rank's thread sleeps until the other's numbers are there, and to wake it up takes ten times
    as long as an all-reduce right after another.
    """
    import torch
    import torch.distributed as dist

    numbers, square, taken = torch.ones(count), torch.ones(WORK, WORK), []
    for _ in range(40):
        square @ square
        begin = time.perf_counter()
        dist.all_reduce(numbers)
        taken.append(time.perf_counter() - begin)
    return statistics.mean(taken)


def measure(name: str, steps: int) -> list[dict[str, Any]]:
    """What every rank of a case found, each a new process."""
    return run_ranks("benchmarks.predicted_step", ["--rank", name, "--steps", str(steps)], CASES[name].world)


def measured_machine(found: list[dict[str, Any]]) -> Machine:
    """The machine of ranks that measured it together."""
    link = statistics.mean(rank["link"] for rank in found) / ACHIEVED
    rates = average([Rates.model_validate(rank["rates"]) for rank in found])
    latency = statistics.mean(rank["latency"] for rank in found)
    changes = {"reached": rates, "link": link, "network": link, "latency": latency}
    return machine("cpu", len(found)).model_copy(update=changes)


def compare(name: str, steps: int) -> dict[str, Any]:
    """Seconds of a case's step both ways; those that are predicted also by what they are spent on."""
    found, case = measure(name, steps), CASES[name]
    dp_size = case.world // case.config.parallel.tp // case.config.parallel.pp
    plan = make_plan(case.config, dp_size, measured_machine(found))
    measured = statistics.median(max(turn) for turn in zip(*(rank["seconds"] for rank in found), strict=True))
    predicted = plan.time.total
    return {
        "case": name, "measured": measured, "predicted": predicted, "difference": predicted / measured - 1,
        "parts": plan.time.to_dict(), "link": found[0]["link"], "latency": found[0]["latency"],
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """See the module's documentation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=OUTPUT / "predicted_step.json")
    options = parser.parse_args(arguments)
    if options.rank:
        run_rank(CASES[options.rank], options.steps)
        return
    records = []
    for name in options.only:
        records.append(compare(name, options.steps))
        print(f"{name}: {records[-1]['measured']:.2f} s, predicted {records[-1]['predicted']:.2f}", flush=True)
    rows = [
        [one["case"], f"{one['measured']:.2f}", f"{one['predicted']:.2f}", f"{one['difference']:+.0%}"]
        for one in records
    ]
    print(table(["layout", "measured s", "predicted s", "difference"], rows))
    publish({"cases": records}, options.output)


if __name__ == "__main__":
    main()
