"""The callback that counts steps whose loss or gradients were not finite, and gives up after too many in a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from checkpoints.folder import BadStepCounts
from megamem.errors import NonFiniteError
from megamem.runs.sinks.base import LogRecord
from megamem.training.loop import Callback, Trainer

if TYPE_CHECKING:
    from megamem.pipeline.base import StepResult


class BadSteps(Callback):
    """Counts steps skipped for non-finite values and gives up after too many in a row; looks at logging steps only."""

    def __init__(self, limit: int) -> None:
        """limit: skipped steps in a row after which the run is given up."""
        self.limit = limit
        self.total = 0
        """Skipped steps that were counted so far."""
        self._pending: list[tuple[int, Tensor]] = []
        self._streak: list[int] = []
        self._longest: list[int] = []

    def counts(self) -> BadStepCounts:
        """Return what a checkpoint holds; reads device values."""
        self._count()
        return {"total": self.total, "streak": self._streak}

    def set_counts(self, saved: BadStepCounts) -> None:
        """Continue the counts of a checkpoint."""
        self.total, self._streak = saved["total"], list(saved["streak"])

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """See `Callback.after_step`."""
        self._pending.append((trainer.step, result.bad))

    def _count(self) -> None:
        """Read the flags of the steps that were not counted yet."""
        if not self._pending:
            return
        flags = torch.stack([bad for _, bad in self._pending]).tolist()
        for (step, _), bad in zip(self._pending, flags, strict=True):
            self._streak = [*self._streak, step] if bad else []
            self.total += int(bad)
            self._longest = max(self._longest, self._streak, key=len)
        self._pending.clear()

    def at_log(self, trainer: Trainer, record: LogRecord) -> None:
        """Add `skipped`; raise NonFiniteError with steps and samples if too many steps in a row were bad."""
        self._count()
        streak, self._longest = self._longest, []
        record["skipped"] = self.total
        if len(streak) >= self.limit:
            first, last, rows = streak[0], streak[-1], trainer.config.global_rows
            raise NonFiniteError(
                f"loss or gradients were not finite in steps {first}-{last}, samples {(first - 1) * rows}-"
                f"{last * rows - 1}: {len(streak)} steps in a row (training.max_bad_steps {self.limit}) updated "
                "nothing; the weights from before them are saved"
            )
