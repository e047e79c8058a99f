"""The held-out evaluation of a trained run, after and outside of its training."""

from __future__ import annotations

import torch
from rich.console import Console

from checkpoints.trained import TrainedRun
from megamem.errors import ConfigError
from megamem.evaluation.evaluator import Evaluator
from megamem.evaluation.result import EvaluationResult
from megamem.evaluation.run import final_evaluation
from megamem.parallel.topology import Topology
from megamem.training.build import held_out_documents, open_tokenizer


def evaluate_run(
    run: TrainedRun, dtype: torch.dtype, device: torch.device, console: Console | None = None
) -> EvaluationResult:
    """Evaluate a checkpoint's model on the held-out text of its run, in this process.

    console: where a progress bar is shown; none if not given.
    Raises: ConfigError where the run names no held-out text, CheckpointError or DataError for damaged files.
    """
    if not run.config.data.validation:
        raise ConfigError(f"{run.checkpoint.path}: its run names no held-out text; give data.validation='[SHARDS]'")
    topology = Topology.start(device=str(device))
    return final_evaluation(
        Evaluator(run.load(dtype, topology.device), topology, run.config.evaluation.rows),
        lambda: held_out_documents(run.config),
        open_tokenizer(run.config),
        run.config,
        console=console,
    )
