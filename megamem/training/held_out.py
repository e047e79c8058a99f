"""The held-out evaluation of a trained run, after and outside of its training."""

from __future__ import annotations

from typing import Protocol

import torch
from rich.console import Console

from megamem.config.run import RunConfig
from megamem.errors import ConfigError
from megamem.evaluation.evaluator import Evaluator
from megamem.evaluation.result import EvaluationResult
from megamem.evaluation.run import final_evaluation
from megamem.model.stage import Stage
from megamem.parallel.topology import Topology
from megamem.training.build import held_out_documents, open_tokenizer


class Trained(Protocol):
    """A trained model that lies somewhere, with the configuration that it is evaluated by."""

    @property
    def config(self) -> RunConfig:
        """The configuration of the run."""

    @property
    def origin(self) -> str:
        """Where it lies, for messages."""

    def load(self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Stage:
        """Return the whole model."""


def evaluate_run(
    run: Trained, dtype: torch.dtype, device: torch.device, console: Console | None = None
) -> EvaluationResult:
    """Evaluate a trained model on held-out text, in this process.

    console: where a progress bar is shown; none if not given.
    Raises: ConfigError where its configuration names no held-out text; CheckpointError, ConversionError or DataError
        for damaged files, or weights that do not fit the configuration.
    """
    if not run.config.data.validation:
        raise ConfigError(f"{run.origin}: its configuration names no held-out text; give data.validation='[SHARDS]'")
    topology = Topology.start(device=str(device))
    return final_evaluation(
        Evaluator(run.load(dtype, topology.device), topology, run.config.evaluation.rows),
        lambda: held_out_documents(run.config),
        open_tokenizer(run.config),
        run.config,
        console=console,
    )
