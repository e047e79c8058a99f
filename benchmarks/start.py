"""What it costs a rank to build a model of about 100M parameters, with weights drawn or only room for them.

    python -m benchmarks.start [--rounds N]

One process on the CPU. A run that goes on from a checkpoint draws nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from statistics import median
from typing import Any

TREE: dict[str, Any] = {
    "name": "start",
    "model": {
        "layers": 12, "hidden_size": 768, "heads": 12, "vocab_size": 8192, "chunk_size": 256, "mixer": "full_attention",
    },
    "data": {"sources": "none", "sequence_length": 1024},
    "training": {"steps": 1, "batch_tokens": 1024},
    "parallel": {"device": "cpu"},
}  # fmt: skip


def main() -> None:
    """Build the model both ways in turns and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    from megamem.config.load import parse_config
    from megamem.config.run import RunConfig
    from megamem.costs.parameters import parameter_counts
    from megamem.pipeline.base import build_own_stage
    from megamem.training.build import start_topology

    config = parse_config(RunConfig, TREE, "benchmark")
    topology = start_topology(config)
    times: dict[str, list[float]] = {"drawn": [], "empty": []}
    for _ in range(rounds):
        for name, seconds in times.items():
            begun = time.perf_counter()
            build_own_stage(config, topology, draw=name == "drawn")
            seconds.append(time.perf_counter() - begun)
    found = {name: median(seconds) for name, seconds in times.items()}
    sys.stdout.write(f"{parameter_counts(config.model)['total'] / 1e6:,.1f}M parameters\n")
    for name, value in found.items():
        sys.stdout.write(f"{name}: {value:.3f} s\n")
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
