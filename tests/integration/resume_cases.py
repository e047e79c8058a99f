"""What the resume tests run on each rank: whole trainings, and a load under another layout."""

from __future__ import annotations

import math
from io import StringIO
from typing import Any

import torch
from rich.console import Console

from megamem.config.load import parse_config
from megamem.config.run import RunConfig


def poison_new_models() -> None:
    """From now on, models of this process are built of NaN: weights that are neither drawn nor loaded would show."""
    from megamem.pipeline import base

    build_stage = base.build_stage

    def poisoned(*arguments: Any) -> Any:
        stage = build_stage(*arguments)
        for parameter in stage.parameters():
            parameter.data.fill_(math.nan)
        return stage

    base.build_stage = poisoned


def draw_in_each_step() -> None:
    """From now on, each step of this process draws a random number: generators show whether they were put back."""
    from megamem.pipeline import base

    step = base.TrainingEngine.step

    def drawing(*arguments: Any, **options: Any) -> Any:
        torch.rand(())
        return step(*arguments, **options)

    base.TrainingEngine.step = drawing


def train_each(trees: dict[str, dict[str, Any]]) -> dict[str, bool]:
    """One run after the other; whether each came to its end."""
    from megamem.training.train import train

    poison_new_models()
    draw_in_each_step()
    ended = {}
    for name, tree in trees.items():
        figures = train(parse_config(RunConfig, tree, name), Console(file=StringIO()))
        ended[name] = figures is not None
    return ended


def reload(cases: dict[str, dict[str, Any]]) -> dict[str, bool]:
    """Load a checkpoint under another layout and save it again at once: case -> {"tree", "from", "to"}."""
    from checkpoints.folder import open_checkpoint
    from checkpoints.location import location
    from checkpoints.resume import load_training_state
    from checkpoints.saver import Saver
    from checkpoints.states import Lanes
    from checkpoints.training_state import optimizer_fragments, optimizer_steps
    from megamem.config.checkpoint import CheckpointConfig
    from megamem.pipeline.engine import build_engine
    from megamem.training.build import start_topology
    from megamem.training.checkpointing import cpu_group

    poison_new_models()
    for name, case in cases.items():
        config = parse_config(RunConfig, case["tree"], name)
        topology = start_topology(config)
        engine = build_engine(config, topology, draw=False)
        group = cpu_group(60)
        run = load_training_state(engine, open_checkpoint(case["from"]), group)
        saver = Saver(location(case["to"]), CheckpointConfig(), group)
        tensors = {**optimizer_fragments(engine), **Lanes.of(engine).fragments(engine.carried)}
        saver.save(run["step"], tensors, {**run, "optimizer_steps": optimizer_steps(engine)}, wait=True)
    return dict.fromkeys(cases, True)


def begin_phases(tree: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Losses and norms of two steps of the second phase: by an engine built for it, by one built for the first."""
    from megamem.pipeline.engine import build_engine
    from megamem.training.build import start_topology
    from megamem.training.checks import open_feeder
    from megamem.training.phases import phases_of

    config = parse_config(RunConfig, tree, "phases")
    topology = start_topology(config)
    phase = phases_of(config)[1]
    found = []
    for first in (phase.config, config):
        engine = build_engine(first, topology)
        if first is config:
            engine.begin_phase(phase.config)
        feeder = open_feeder(phase.config, topology.dp_rank, topology.dp_size)
        figures = []
        for step in range(2):
            batches = [feeder.batch(step, index).to(topology.device) for index in range(engine.accumulation)]
            result = engine.step(batches, lr=1e-2)
            figures += [float(result.loss_sum), float(result.grad_norm)]
        found.append(figures)
    return found[0], found[1]
