"""A trained model to read with: a checkpoint, the configuration of its run, and the model itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from checkpoints.find import find_checkpoint
from checkpoints.folder import Checkpoint
from checkpoints.location import Location
from checkpoints.verify import verify
from checkpoints.whole import whole_model
from megamem.config.load import apply_overrides, parse_config
from megamem.config.run import RunConfig
from megamem.model.stage import Stage


@dataclass(frozen=True)
class TrainedRun:
    """A checkpoint and the configuration of the run that saved it."""

    checkpoint: Checkpoint
    config: RunConfig

    @property
    def origin(self) -> str:
        """Where it lies, for messages."""
        return str(self.checkpoint.path)

    @property
    def title(self) -> str:
        """The name of the run and the step of the checkpoint, for people."""
        return f"{self.config.name}, step {self.checkpoint.step}"

    def changed(self, overrides: Sequence[str]) -> TrainedRun:
        """Return the same with overrides of the configuration (`key.path=value`). Raises ConfigError."""
        tree = apply_overrides(self.config.model_dump(mode="json"), overrides)
        return replace(self, config=parse_config(RunConfig, tree, _origin(self.checkpoint)))

    def load(self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Stage:
        """Check the checkpoint's files and return the whole model for evaluation. Raises CheckpointError."""
        verify(self.checkpoint, skip_extents=True)
        return whole_model(self.checkpoint, self.config.model, dtype).to(device)


def open_run(path: str | Location) -> TrainedRun:
    """Return what a checkpoint, or the newest complete one of a run folder, holds; its tensors are not read yet.

    Raises: CheckpointError where there is none, ConfigError where its configuration is not valid.
    """
    checkpoint = find_checkpoint(path)
    return TrainedRun(checkpoint, parse_config(RunConfig, checkpoint.run()["config"], _origin(checkpoint)))


def _origin(checkpoint: Checkpoint) -> str:
    return f"{checkpoint.path / 'run.json'}: config"
