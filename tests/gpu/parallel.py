"""Several processes on devices of their own, NCCL between CUDA devices: losses are those of one process.

On the CPU the same functions run over gloo.
"""

from __future__ import annotations

import json
import os
import signal
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from megamem.config.load import parse_config
from megamem.config.run import RunConfig
from tests.distributed.harness import WorldError, run_distributed
from tests.distributed.training_cases import ROWS, local_batches, run_config
from tests.integration.commands import LENGTH, run_tree

LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "dp2-zero1": (2, {"zero_stage": 1}),
    "dp2-zero2": (2, {"zero_stage": 2}),
    "dp2-zero3": (2, {"zero_stage": 3}),
    "tp2-pp2": (4, {"tp": 2, "pp": 2}),
    "tp2-dp2-zero2": (4, {"tp": 2, "zero_stage": 2}),
    "pp2-dp2": (4, {"pp": 2}),
}
"""Processes of a layout, and what `parallel` says of it."""
STEPS, EVERY = 6, 2
"""Optimizer steps, and steps between checkpoints."""
# of losses, relative. FP32: sums in another order, carried through some AdamW steps (tests/distributed/parity.py).
# BF16: 2^-9 for each rounding, and a split product rounds its parts
TOLERANCES = {"fp32": 1e-4, "bf16": 3e-2}


def train_layouts(payload: dict[str, Any]) -> dict[str, list[float]]:
    """Train a few steps in each layout on this rank: layout and precision -> the loss of each step over all ranks.

    payload: {"device", "layouts": names of `LAYOUTS`, or `alone`; "precisions"}.
    """
    from megamem.parallel.topology import Topology
    from megamem.pipeline.engine import build_engine

    found: dict[str, list[float]] = {}
    for name in payload["layouts"]:
        for precision in payload["precisions"]:
            parallel = {} if name == "alone" else LAYOUTS[name][1]
            config = run_config(
                training={"precision": precision, "micro_batch_size": ROWS // 4, "bptt_chunks": 2},
                parallel={"zero_stage": 1, "device": payload["device"], **parallel},
                optimizer={"grad_clip": 1.0},
            )
            topology = Topology.start(config.parallel.tp, pp=config.parallel.pp, device=payload["device"])
            engine = build_engine(config, topology)
            losses = []
            for step in range(STEPS):
                batches = [batch.to(topology.device) for batch in local_batches(config, topology, step)]
                result = engine.step(batches, 1e-3, steps_before=step)
                torch.distributed.all_reduce(result.loss_sum, group=topology.dp_group)
                losses.append((result.loss_sum / result.predicted).item())
            engine.close()
            found[f"{name} {precision}"] = losses
    return found


def losses_of(world: int, device: str, layouts: list[str], precisions: list[str]) -> dict[str, list[float]]:
    """Return the losses of `train_layouts` in a world of so many processes, which all ranks must agree on."""
    payload = {"device": device, "layouts": layouts, "precisions": precisions}
    ranks = run_distributed(world, f"{__name__}:train_layouts", payload)
    for rank in ranks[1:]:
        assert rank == ranks[0], "ranks report different losses"
    return ranks[0]


def assert_follows(losses: list[float], alone: list[float], precision: str) -> None:
    """Check that the losses of a run's steps are those of one process."""
    assert len(losses) == len(alone) == STEPS
    errors = [abs(ours / theirs - 1) for ours, theirs in zip(losses, alone, strict=True)]
    assert max(errors) <= TOLERANCES[precision], (losses, alone)


def tree_of(
    corpus: Path, runs: Path, name: str, device: str, parallel: dict[str, int], **training: Any
) -> dict[str, Any]:
    """Return a run of `STEPS` steps with a checkpoint after every second one."""
    return run_tree(
        corpus,
        runs,
        name=name,
        data={"validation": []},
        training={"steps": STEPS, "batch_tokens": 4 * LENGTH, "micro_batch_size": 1, **training},
        parallel={"device": device, **parallel},
        checkpoint={"every": EVERY, "keep_last": 5},
        logging={"every": 1},
        evaluation={"every": 0},
    )


def train_run(payload: dict[str, Any]) -> bool:
    """Train a run on this rank; whether it came to its end.

    payload: {"tree": its configuration, "kill_rank": a rank that is killed as soon as a checkpoint stands, or None}.
    """
    from megamem.training.train import train

    if payload["kill_rank"] == int(os.environ["RANK"]):
        _kill_after_checkpoint(Path(payload["tree"]["runs_folder"]) / payload["tree"]["name"] / "checkpoints")
    return train(parse_config(RunConfig, payload["tree"], "run"), Console(file=StringIO())) is not None


def _kill_after_checkpoint(folder: Path) -> None:
    """Let this process be killed in the second step after a checkpoint."""
    from checkpoints.folder import checkpoints_in
    from megamem.pipeline.base import TrainingEngine

    step = TrainingEngine.step

    def deadly(engine: Any, batches: Any, lr: float, watch: Any = None, steps_before: int = 0) -> Any:
        if steps_before == EVERY + 1:
            deadline = time.monotonic() + 120
            while not checkpoints_in(folder) and time.monotonic() < deadline:
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        return step(engine, batches, lr, watch, steps_before)

    TrainingEngine.step = deadly  # type: ignore[method-assign]


def run_to_end(world: int, tree: dict[str, Any]) -> list[float]:
    """Train a run in a world of so many processes; the logged loss of each step, from its first life on."""
    payload = {"tree": tree, "kill_rank": None}
    ended = run_distributed(world, f"{__name__}:train_run", payload)
    assert ended == ["stop_after" not in tree["training"]] * world
    return logged_losses(tree)


def run_and_kill(world: int, tree: dict[str, Any]) -> None:
    """Train a run until its last rank is killed, after the first checkpoint."""
    payload = {"tree": tree, "kill_rank": world - 1}
    with pytest.raises(WorldError, match=f"rank {world - 1} of {world} died of SIGKILL"):
        run_distributed(world, f"{__name__}:train_run", payload)


def logged_losses(tree: dict[str, Any]) -> list[float]:
    """Return the loss of each step, in order; a step that was trained twice counts as it was trained last."""
    lines = (Path(tree["runs_folder"]) / tree["name"] / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [record for record in map(json.loads, lines) if "loss" in record]
    losses = {record["step"]: record["loss"] for record in records}
    return [losses[step] for step in sorted(losses)]
