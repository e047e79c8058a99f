"""What a checkpoint costs with configs/recipes/books.yaml: the step that saves, the steps after it, bytes, seconds.

    python -m benchmarks.checkpoints [--rounds N] [--store]

With --store they lie in an object store that the tests' server keeps on the same disk and that is reached over HTTP.
Two processes, TP 2, FP32, random tokens. Each round times some plain steps, a step with an asynchronous save (which
waits for the copy only), and the steps that run while the thread writes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

from tests.integration.s3_server import BUCKET, S3Server

PROCESSES, PLAIN_STEPS = 2, 6
IDEAL_BYTES = 12
"""Per parameter: an FP32 weight and two moments."""


def measure(folder: str, rounds: int) -> dict[str, Any]:
    """One rank's part."""
    from checkpoints.folder import checkpoints_in
    from checkpoints.location import location
    from checkpoints.records import SavedRun
    from checkpoints.resume import load_training_state
    from checkpoints.saver import Saver
    from checkpoints.training_state import all_fragments, optimizer_steps
    from megamem.config.checkpoint import CheckpointConfig
    from megamem.config.load import load_config
    from megamem.config.run import RunConfig
    from megamem.costs.parameters import parameter_counts
    from megamem.pipeline.engine import build_engine
    from megamem.training.build import start_topology
    from megamem.training.checkpointing import cpu_group, run_facts
    from megamem.training.dry_run import mock_batches

    config = load_config(RunConfig, Path("configs/recipes/books.yaml"))
    topology = start_topology(config)
    engine, batches = build_engine(config, topology), mock_batches(config, topology)
    group = cpu_group(120)
    saver = Saver(location(folder), CheckpointConfig(keep_last=1), group)

    def timed_step() -> float:
        begun = time.perf_counter()
        engine.step(batches, 1e-3)
        return time.perf_counter() - begun

    def save(step: int) -> None:
        run: SavedRun = {
            **run_facts(config, ["mock"], None),
            "step": step, "tokens": 0, "samples": 0, "optimizer_steps": optimizer_steps(engine),
            "bad_steps": {"total": 0, "streak": []}, "val_loss": None,
            "layout": {"pp": 1, "dp": topology.dp_size, "tp": topology.tp_size}, "placement": [config.model.layers],
        }  # fmt: skip
        saver.save(step, all_fragments(engine), run)

    timed_step()
    save(1)  # makes the staging buffers
    saver.wait()
    plain, stalls, during = [], [], []
    for index in range(rounds):
        times = [timed_step() for _ in range(PLAIN_STEPS)]
        begun = time.perf_counter()
        save(index + 2)
        stalls.append(time.perf_counter() - begun)
        while saver.writing:
            during.append(timed_step())
        saver.wait()
        plain += times
    begun = time.perf_counter()
    (checkpoint,) = checkpoints_in(location(folder))
    load_training_state(engine, checkpoint, group)
    loading = time.perf_counter() - begun
    step = median(plain)
    return {
        "step_seconds": step,
        "stall_seconds": median(stalls),
        "stall_over_step": median(stalls) / step,
        "step_while_writing_over_step": median(during) / step if during else None,
        "save_seconds": median(times.written for times in saver.times[1:]),
        "load_seconds": loading,
        "bytes": checkpoint.bytes,
        "bytes_over_ideal": checkpoint.bytes / (IDEAL_BYTES * parameter_counts(config.model)["total"]),
    }


def main() -> None:
    """Start two ranks; rank 0 reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--folder")
    parser.add_argument("--store", action="store_true")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        found = measure(arguments.folder, arguments.rounds)
        if os.environ["RANK"] == "0":
            for name, value in found.items():
                sys.stdout.write(f"{name.replace('_', ' ')}: {value:,.4g}\n")
            sys.stdout.write(json.dumps(found) + "\n")
        return
    Path("runs/benchmarks").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir="runs/benchmarks") as folder:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES)]
        own = ["-m", "benchmarks.checkpoints", "--rounds", str(arguments.rounds), "--folder"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with S3Server(Path(folder) / "server") if arguments.store else nullcontext() as server:
            own += [f"s3://{BUCKET}/benchmark" if server else folder]
            environment |= server.environment if server else {}
            done = subprocess.run([sys.executable, *launcher, *own], check=False, env=environment)
        raise SystemExit(done.returncode)


if __name__ == "__main__":
    main()
