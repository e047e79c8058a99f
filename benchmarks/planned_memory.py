"""Planned against measured memory: real layouts on the CPU, a process per rank.

    python -m benchmarks.planned_memory [NAME ...]

Each layout trains two steps on random tokens. Measured is the most that a rank's process has ever had resident
(`VmHWM`), from its start to the end of the second step, less the same layout's with a model of one narrow layer for
each stage: the baseline, which is interpreter, libraries and process groups. Planned is what `megamem plan` says.

The allocator is told to give memory back when it is freed, so that resident means in use.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import OUTPUT, publish, table
from megamem.config.load import parse_config
from megamem.config.run import RunConfig

ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
STEPS = 2
CACHING = {"kind": "memory_caching", "segment": 256, "combine": "gated", "memory": {"kind": "titans"}}
SELECTIVE = {"kind": "memory_caching", "segment": 256, "combine": "selective", "top_k": 4, "memory": {"kind": "dla"}}


@dataclass(frozen=True)
class Layout:
    """A run that is planned and measured."""

    world: int = 1
    mixer: Any = "attention"
    model: dict[str, Any] = field(default_factory=dict)
    parallel: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    tokens: int = 1024
    """Of a sequence."""

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
            model |= {"layers": layers, "hidden_size": 8 * heads, "vocab_size": 1024}
            tokens = model["chunk_size"] * training.get("bptt_chunks", 2)
        ranks = self.world // parallel.get("tp", 1) // parallel.get("pp", 1)
        sequences = ranks * training["micro_batch_size"] * (2 * parallel.get("pp", 1))
        given = {
            "name": "planned",
            "model": model,
            "data": {"sources": ["none"], "sequence_length": tokens},
            "training": {"steps": STEPS, "batch_tokens": sequences * tokens, **training},
            "parallel": parallel,
        }
        return parse_config(RunConfig, given, "layout")


def with_ranks(**parallel: Any) -> dict[str, Any]:
    return parallel


LAYOUTS = {
    "one rank": Layout(),
    "recompute": Layout(training={"recompute": True, "micro_batch_size": 4}),
    "windows of 2 chunks": Layout(training={"bptt_chunks": 2, "micro_batch_size": 4}),
    "PP 2": Layout(2, parallel={"pp": 2}, training={"micro_batch_size": 2}),
    "PP 2, windows of 2": Layout(2, parallel={"pp": 2}, training={"bptt_chunks": 2, "micro_batch_size": 4}),
    "PP 4, windows of 4": Layout(4, parallel={"pp": 4}, training={"bptt_chunks": 4, "micro_batch_size": 4}),
    "TP 2": Layout(2, parallel={"tp": 2}, training={"micro_batch_size": 2}),
    "TP 2, sequence parallel": Layout(
        2, parallel={"tp": 2, "sequence_parallel": True}, training={"micro_batch_size": 2}
    ),
    "ZeRO 1, DP 2": Layout(2, parallel={"zero_stage": 1}),
    "ZeRO 2, DP 2": Layout(2, parallel={"zero_stage": 2}),
    "ZeRO 3, DP 2": Layout(2, parallel={"zero_stage": 3}),
    "PP 2 x TP 2": Layout(4, parallel={"pp": 2, "tp": 2}, training={"micro_batch_size": 3}),
    "Elastic Memory": Layout(mixer={"kind": "elastic_memory", "order": 256}),
    "Elastic Memory, PP 2": Layout(
        2, {"kind": "elastic_memory", "order": 256}, parallel={"pp": 2}, training={"micro_batch_size": 2}
    ),
    "Titans + GRM": Layout(mixer=CACHING),
    "Titans + GRM, TP 2": Layout(2, mixer=CACHING, parallel={"tp": 2}),
    "DLA + SSC": Layout(mixer=SELECTIVE),
    "BF16, ZeRO 1": Layout(training={"precision": "bf16", "micro_batch_size": 2}, parallel={"zero_stage": 1}),
    "BF16, ZeRO 1, PP 2 x DP 2": Layout(
        4, training={"precision": "bf16", "micro_batch_size": 4}, parallel={"zero_stage": 1, "pp": 2}
    ),
    "full attention": Layout(mixer="full_attention"),
    "Memorizing attention": Layout(mixer="memorizing_attention"),
}


def memory(what: str) -> int:
    """A line of this process's status, bytes."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what)]
    return int(line.split()[1]) * 1024


def measure_rank(config: RunConfig) -> None:
    """One rank: build, step, tell."""
    import torch

    torch.set_num_threads(1)
    from megamem.pipeline.engine import build_engine
    from megamem.training.start import mock_batches, start_topology

    topology = start_topology(config)
    engine = build_engine(config, topology)
    found = {"built": memory("VmHWM"), "built now": memory("VmRSS")}
    parts = {}
    for step in range(STEPS):
        engine.step(mock_batches(config, topology), config.optimizer.lr)
        found[f"step {step}"] = memory("VmHWM")
        found[f"after {step}"] = memory("VmRSS")
    print("FOUND " + json.dumps({"stage": topology.pp_rank, **found, **parts}))


def measure(name: str, small: bool) -> list[dict[str, Any]]:
    """Of every rank."""
    world = LAYOUTS[name].world
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, **ALLOCATOR, "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.planned_memory", "--rank", name, *(["--small"] if small else [])]
    ranks = [
        subprocess.Popen(
            command, env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(world)
    ]
    outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{name}: a rank failed")
    return [
        json.loads(line.removeprefix("FOUND "))
        for out in outputs
        for line in out.splitlines()
        if line.startswith("FOUND ")
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--rank", help="run as a rank of this layout")
    parser.add_argument("--small", action="store_true", help="with the baseline's model")
    options = parser.parse_args()
    if options.rank:
        measure_rank(LAYOUTS[options.rank].config(options.small))
        return
    from megamem.planning.activations import Activations
    from megamem.planning.peak import step_peak
    from megamem.planning.ranks import held_bytes, stage_parameters
    from megamem.pipeline.costs import place
    from megamem.pipeline.placement import contiguous

    for name in options.names or LAYOUTS:
        layout = LAYOUTS[name]
        config = layout.config()
        pp, tp = config.parallel.pp, config.parallel.tp
        dp = layout.world // pp // tp
        acts = Activations(config.model, config.training.precision, config.chunks)
        plans = []
        for stage, layers in enumerate(contiguous(place(config))):
            held = held_bytes(config, layers, stage_parameters(config.model, layers, tp), tp, dp)
            peak = step_peak(config, acts, layers, stage, tp, dp)
            plans.append((held, peak))
        base = measure(name, True)
        big = measure(name, False)
        M = 2**20
        for b, s in zip(big, base):
            held, peak = plans[b["stage"]]
            static = held.weights + held.optimizer
            planned = static + peak.total
            got = b["step 1"] - s["step 1"]
            print(
                f"{name:28s} stage {b['stage']}: static {static / M:7.0f} grads {peak.gradients / M:5.0f} flight {peak.in_flight / M:7.0f} working {peak.working / M:6.0f} states {peak.states / M:5.0f} borders {peak.borders / M:5.0f}"
                f" | planned {planned / M:7.0f} measured {got / M:7.0f} = {planned / got - 1:+.1%}; with base {(planned + s['step 1']) / b['step 1'] - 1:+.1%}"
                f" | base {s['step 1'] / M:5.0f} built {b['built now'] / M - s['built now'] / M:6.0f} (peak {b['built'] / M:5.0f}) after0 {(b['after 0'] - s['after 0']) / M:6.0f} after1 {(b['after 1'] - s['after 1']) / M:6.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
