"""What the memory is worth: Elastic Memory against the same model with plain attention in its place, several seeds.

    python -m benchmarks.memory_gain --seeds 0 1 2

Every run has the same steps, batches and evaluation; a seed sets initial weights and data order. Reports the held-out
loss beyond each document's first chunk, per seed and as mean and standard deviation of the paired difference.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any

FIGURE = "beyond_first_chunk_loss"


def start(arguments: argparse.Namespace, seed: int, memory: bool, folder: Path) -> tuple[subprocess.Popen[bytes], Path]:
    """One training on one process and one thread."""
    name = f"{'memory' if memory else 'plain'}-{seed}"
    data = arguments.data
    overrides = [
        f"name={name}", f"runs_folder={folder}", f"training.seed={seed}", f"data.seed={seed}",
        f"data.sources=[{data / 'shards/train'}]", f"data.validation=[{data / 'shards/validation'}]",
        f"data.tokenizer={data / 'tokenizer'}",
        "parallel.tp=1", "logging.wandb.mode=disabled", "logging.every=50", "evaluation.every=0", *arguments.override,
    ]  # fmt: skip
    if not memory:
        overrides.append("model.memory=[]")
    command = [sys.executable, "-m", "megamem", "train", str(arguments.config), *overrides]
    log = (folder / f"{name}.log").open("wb")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment), folder / name


def run_all(arguments: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    """All runs, `--parallel` at a time; results by run name."""
    waiting = [(seed, memory) for seed in arguments.seeds for memory in (True, False)]
    running: list[tuple[subprocess.Popen[bytes], Path]] = []
    results: dict[str, dict[str, Any]] = {}
    while waiting or running:
        while waiting and len(running) < arguments.parallel:
            running.append(start(arguments, *waiting.pop(0), folder))
        time.sleep(1)
        for job, run in [pair for pair in running if pair[0].poll() is not None]:
            running.remove((job, run))
            if job.returncode:
                raise SystemExit(f"{run}: exit code {job.returncode}; see {folder / (run.name + '.log')}")
            results[run.name] = json.loads((run / "result.json").read_text())
            print(f"{run.name}: {FIGURE} {results[run.name][FIGURE]:.4f}", flush=True)
    return results


def main() -> None:
    """Parse, run, print the table, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, default=Path("configs/recipes/demo.yaml"))
    parser.add_argument("--data", type=Path, default=Path("runs/demo-data"), help="folder that `megamem demo` filled")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("override", nargs="*", help="section.key=value for every run")
    arguments = parser.parse_args()
    folder = Path("runs") / time.strftime("memory-gain-%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    results = run_all(arguments, folder)
    print("\n| seed | memory | plain attention | difference |\n|---|---|---|---|")
    differences = []
    for seed in arguments.seeds:
        with_memory, plain = results[f"memory-{seed}"][FIGURE], results[f"plain-{seed}"][FIGURE]
        differences.append(plain - with_memory)
        print(f"| {seed} | {with_memory:.4f} | {plain:.4f} | {plain - with_memory:+.4f} |")
    spread = stdev(differences) if len(differences) > 1 else 0.0
    print(f"\ngain {mean(differences):+.4f} nats/token, standard deviation over seeds {spread:.4f}")
    report = {"gain": mean(differences), "stdev": spread, "differences": differences, "runs": results}
    (folder / "memory_gain.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps({"gain": report["gain"], "stdev": spread, "folder": str(folder)}))


if __name__ == "__main__":
    main()
