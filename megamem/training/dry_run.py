"""`megamem train --dry-run`: everything is built and one optimizer step runs on random tokens; nothing is written."""

from __future__ import annotations

import time

import numpy as np
import torch
from rich.console import Console

from megamem.config.load import dump_yaml
from megamem.config.run import RunConfig
from megamem.data.batch import Batch
from megamem.parallel.topology import Topology
from megamem.pipeline.base import TrainingEngine
from megamem.pipeline.engine import build_engine
from megamem.pipeline.freezing import check_learns
from megamem.planning.arithmetic import describe
from megamem.training.build import start_topology
from megamem.training.callbacks.metrics import peak_memory
from megamem.training.description import describe_stages


def dry_run(config: RunConfig, console: Console) -> None:
    """Print the resolved configuration and its arithmetic, then run one step of each phase on random tokens."""
    check_learns(config)
    topology = start_topology(config)
    if topology.rank == 0:
        console.print(dump_yaml(config), highlight=False)
        for line in describe(config, topology.dp_size):
            console.print(line, highlight=False)
    engine = build_engine(config, topology)
    if topology.rank == 0:
        for line in describe_stages(engine):
            console.print(line, highlight=False)
    phases = config.phases
    for number, phase in enumerate(phases):
        if len(phases) > 1:
            engine.begin_phase(phase)
            if topology.rank == 0:
                console.print(
                    f"phase {number + 1}: sequences of {phase.data.sequence_length:,} tokens", highlight=False
                )
        _mock_step(engine, console)
    engine.close()


def _mock_step(engine: TrainingEngine, console: Console) -> None:
    """Run one optimizer step on random tokens and say what it took."""
    config, topology = engine.config, engine.topology
    started = time.monotonic()
    result = engine.step(mock_batches(config, topology), config.optimizer.lr)
    loss, predicted, bad = torch.stack([result.loss_sum, result.predicted, result.bad.double()]).tolist()
    if topology.rank == 0:
        predicted_here = predicted / topology.dp_size
        console.print(
            f"mock step on {topology.world_size} process(es): loss {loss / predicted_here:.4f} nats/token, "
            f"{time.monotonic() - started:.2f} s, peak memory {peak_memory(topology.device) / 2**30:.2f} GiB on rank 0"
            f"{'' if not bad else ', NOT FINITE'}",
            highlight=False,
        )


def mock_batches(config: RunConfig, topology: Topology) -> list[Batch]:
    """Return a step's micro-batches of random tokens on the device, all documents starting at position 0."""
    length, rows = config.data.sequence_length, config.training.micro_batch_size
    generator = torch.Generator().manual_seed(topology.dp_rank)
    starts = np.repeat(np.arange(0, length, config.model.chunk_size)[:, None], rows, axis=1)
    batches = []
    for _ in range(config.accumulation_steps(topology.dp_size)):
        tokens = torch.randint(config.model.vocab_size, (length + 1, rows), generator=generator)
        batches.append(Batch(tokens[:-1], tokens[1:], starts, tuple(range(rows))).to(topology.device))
    return batches
