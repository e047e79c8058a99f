"""What the SmolLM2 test runs on each rank: perplexity and logits under tensor parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml


def logits_under(tp: int, folder: str, ids: list[int]) -> dict[str, Any]:
    """Whole logits [tokens, vocabulary] of an imported model, read chunk by chunk."""
    from checkpoints.resume import load_initial_weights
    from megamem.evaluation.evaluator import Evaluator
    from megamem.pipeline.engine import build_engine
    from megamem.training.build import start_topology
    from megamem.training.checkpointing import cpu_group
    from tests.distributed.training_cases import run_config

    model = yaml.safe_load((Path(folder) / "model.yaml").read_text())["model"]
    size = model["chunk_size"]
    config = run_config(
        model={**model, "memory": []}, data={"sequence_length": size}, 
        training={"batch_tokens": size, "init_from": str(Path(folder) / "weights.safetensors")},
        parallel={"tp": tp},
    )  # fmt: skip
    topology = start_topology(config)
    engine = build_engine(config, topology)
    load_initial_weights(engine, cpu_group(300))
    tokens = torch.tensor(ids)[:, None]
    logits = Evaluator(engine.stage, topology).logits(tokens)
    return {"logits": logits[:, 0].clone() if logits is not None and topology.rank == 0 else None}
