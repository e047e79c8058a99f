"""The experiment on exports: every mechanism under some layouts, its checkpoint, logits and greedy continuation."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from tests.contract.case import CHUNK, Case
from tests.contract.cases import ARCHITECTURES, CASES
from tests.distributed.training_cases import run_config
from tests.saved_run import saved_run

EXPORTED = [*CASES, *ARCHITECTURES]
KINDS = {case.kind: case for case in reversed(EXPORTED)}
"""The first case of each mechanism and architecture, exported in every run of the tests; the others are slow tests."""
LAYOUTS = {"tp1": (1, {}), "tp2": (2, {"tp": 2}), "pp2": (2, {"pp": 2})}
"""World size and `parallel` section."""
HEADS, CHUNKS, PROMPT = 4, 4, 5
NEW_TOKENS = 300 if os.environ.get("MEGAMEM_CASES") == "all" else 80


def configured(case: Case, parallel: dict[str, int]) -> Any:
    """A run of the case's model."""
    model = case.model(layers=3, at=1, heads=HEADS).model_dump(mode="json")
    return run_config(
        model=model,
        data={"sequence_length": CHUNKS * CHUNK},
        training={"batch_tokens": 2 * CHUNKS * CHUNK},
        parallel=parallel,
    )


def tokens(vocabulary: int) -> torch.Tensor:
    """[tokens, 1] ids of some chunks."""
    return torch.randint(vocabulary, (CHUNKS * CHUNK, 1), generator=torch.Generator().manual_seed(3))


def world(payload: dict[str, Any]) -> dict[str, Any]:
    """Body of a rank: per case and layout `logits` [tokens, vocabulary] (last stage only) and `made`, the new tokens.

    payload: `layouts`, the `folder` checkpoints go to, and the ids of the `cases`.
    """
    from checkpoints.saver import Saver
    from checkpoints.training_state import all_fragments, optimizer_steps
    from megamem.config.checkpoint import CheckpointConfig
    from megamem.evaluation.evaluator import Evaluator
    from megamem.parallel.topology import Topology
    from megamem.pipeline.engine import build_engine
    from megamem.training.checkpointing import cpu_group, run_facts

    results: dict[str, Any] = {}
    for layout, parallel in payload["layouts"].items():
        topology = Topology.start(parallel.get("tp", 1), pp=parallel.get("pp", 1), device="cpu")
        group = cpu_group(60)
        for case in (case for case in EXPORTED if case.id in payload["cases"]):
            config = configured(case, parallel)
            engine = build_engine(config, topology)
            folder = Path(payload["folder"]) / f"{case.id}-{layout}"
            facts = run_facts(config, ["none"], None)
            run = saved_run(0, optimizer_steps=optimizer_steps(engine), **facts)
            Saver(folder, CheckpointConfig(), group).save(0, all_fragments(engine), run, wait=True)
            evaluator = Evaluator(engine.stage, topology)
            ids = tokens(config.model.vocab_size)
            logits = evaluator.logits(ids)
            (made,) = evaluator.generate([ids[:PROMPT, 0].tolist()], NEW_TOKENS)
            own = None if logits is None else logits[:, 0].clone()
            results[f"{case.id}/{layout}"] = {"logits": own, "made": made}
    return results
