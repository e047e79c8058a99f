"""What the tests of `training.freeze` run on each rank: steps in which the parameters of added memories learn alone."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import torch

from checkpoints.weights import WeightsHeader, write_weights
from megamem.config.model import ModelConfig
from megamem.config.run import RunConfig
from megamem.model.stage import meta_stage
from megamem.parallel.gather import whole_parameter
from megamem.parallel.topology import Topology
from megamem.pipeline.base import TrainingEngine
from megamem.pipeline.engine import build_engine
from megamem.pipeline.freezing import learning
from tests.distributed.training_cases import CHUNK, local_batches, read_gradients, run_config
from tests.saved_run import saved_run

SIGNAL = {"kind": "infinity_former", "basis": 8, "widths": [0.1, 0.2], "samples": 8}
MODEL = {
    "layers": 4,
    "mixer": {**SIGNAL, "sticky": "spread"},
    "memory": [{"layers": [1], "mixer": "local_attention"}, {"layers": [2], "mixer": "infini_attention"}],
}
"""Layers with memories whose parameters are new, and one without any."""
GPT2 = {
    **MODEL, "norm": "layer", "mlp": "gelu", "bias": True, "positions": "learned", "max_positions": 3 * CHUNK,
    "tie_embeddings": True,
}  # fmt: skip


def learns(name: str, frozen: str = "base") -> bool:
    """Whether a parameter learns: an added memory's, or where an encoder of two layers is frozen, any but its own."""
    if frozen == "encoder":
        return ".projections." in name or not name.startswith(("encoder_embedding.", "layers.0.", "layers.1."))
    return any(part in name for part in (".long_term.", ".long_output.", ".mixer.gate."))


def new_names(model: ModelConfig) -> set[str]:
    """The parameters of added memories, by global name."""
    return {name for name, _ in meta_stage(model).named_parameters() if learns(name)}


def config_of(case: dict[str, Any]) -> RunConfig:
    """The run of a case, and a file of this process's own that lists what is new."""
    path = Path(tempfile.mkdtemp(), "start.safetensors")
    training = {"freeze": "base", "init_from": str(path), **case.get("training", {})}
    config = run_config(**{**case, "training": training})
    write_weights({}, path, WeightsHeader(sorted(new_names(config.model))))
    return config


def train_frozen(cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each case's gradients, weights and losses, and what its optimizer holds on this rank."""
    return {name: _train(case) for name, case in cases.items()}


def _train(case: dict[str, Any]) -> dict[str, Any]:
    config = config_of(case["config"])
    topology = Topology.start(config.parallel.tp, pp=config.parallel.pp, device="cpu", timeout_s=120)
    engine = build_engine(config, topology)
    before = {name: whole_parameter(p, topology.tp_group).clone() for name, p in engine.parameters().items()}
    if case.get("read"):
        _load(engine, case["read"])
    losses: list[float] = []
    gradients: dict[str, torch.Tensor] = {}
    for step in range(case["steps"]):
        batches = local_batches(config, topology, step)
        result = engine.step(batches, case["lr"], read_gradients(engine, gradients) if step == 0 else None)
        torch.distributed.all_reduce(result.loss_sum, group=topology.dp_group)
        losses.append((result.loss_sum / result.predicted).item())
    weights = {name: whole_parameter(p, topology.tp_group).clone() for name, p in engine.parameters().items()}
    if case.get("write"):
        _save(engine, case["write"])
    kept = topology.tp_rank == topology.dp_rank == 0
    held = [tensor for state in engine.optimizer.state.values() for name, tensor in state.items() if name != "step"]
    return {
        "losses": losses,
        "gradients": gradients if kept else {},
        "weights": weights if kept else {},
        "before": before if kept else {},
        "moments": sum(tensor.numel() for tensor in held),
        "learning": sum(math.prod(getattr(p, "ds_shape", p.shape)) for _, p in learning(engine.stage)),
    }


def _save(engine: TrainingEngine, folder: str) -> None:
    from checkpoints.location import location
    from checkpoints.saver import Saver
    from checkpoints.training_state import all_fragments, optimizer_steps
    from megamem.config.checkpoint import CheckpointConfig
    from megamem.training.checkpointing import cpu_group

    saver = Saver(location(folder), CheckpointConfig(), cpu_group(60))
    run = saved_run(1, optimizer_steps=optimizer_steps(engine))
    saver.save(1, all_fragments(engine), run, wait=True)


def _load(engine: TrainingEngine, folder: str) -> None:
    from checkpoints.folder import open_checkpoint
    from checkpoints.resume import load_training_state
    from megamem.training.checkpointing import cpu_group

    load_training_state(engine, open_checkpoint(Path(folder) / "step-00000001"), cpu_group(60))
