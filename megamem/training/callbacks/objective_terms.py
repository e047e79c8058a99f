"""The callback that logs what an objective trains on besides its first loss, such as a z-loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megamem.runs.sinks.base import LogRecord
from megamem.training.loop import Callback, Trainer

if TYPE_CHECKING:
    from megamem.pipeline.base import StepResult


class ObjectiveTerms(Callback):
    """Adds the objective's further losses to the records of log lines, by name, each per predicted token."""

    def __init__(self, names: Sequence[str]) -> None:
        """names: of all losses of the objective; the first one is the loss of the run, and logged as such."""
        self.names = tuple(names)
        self._sums: Tensor | None = None

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """See `Callback.after_step`. A step that was not finite counts as nothing, as in the loss."""
        figures = torch.cat([result.losses[1:], result.predicted[None] / trainer.topology.dp_size])
        kept = torch.where(result.bad == 0, figures, 0.0)
        self._sums = kept if self._sums is None else self._sums + kept

    def at_log(self, trainer: Trainer, record: LogRecord) -> None:
        """See `Callback.at_log`. A collective of the data-parallel ranks."""
        assert self._sums is not None
        dist.all_reduce(self._sums, group=trainer.topology.dp_group)
        *terms, predicted = self._sums.tolist()
        for name, term in zip(self.names[1:], terms, strict=True):
            record[name] = term / predicted if predicted else float("nan")
        self._sums = None
