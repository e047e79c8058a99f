"""The callback that counts skipped steps: spikes, and those that were not finite, of which too many end the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from checkpoints.records import BadStepCounts
from megamem.errors import NonFiniteError
from megamem.runs.sinks.base import LogRecord
from megamem.training.loop import Callback, Trainer
from megamem.training.phases import samples_after

if TYPE_CHECKING:
    from megamem.pipeline.base import StepResult


class BadSteps(Callback):
    """Counts steps skipped for non-finite values and gives up after too many in a row; looks at logging steps only."""

    def __init__(self, limit: int) -> None:
        """limit: skipped steps in a row after which the run is given up."""
        self.limit = limit
        self.total = 0
        """Steps that were skipped for what was not finite, as far as they were counted."""
        self.spikes = 0
        """Steps that were skipped as spikes, as far as they were counted."""
        self._pending: list[tuple[int, Tensor, Tensor]] = []
        self._streak: list[int] = []
        self._longest: list[int] = []

    def counts(self) -> BadStepCounts:
        """Return what a checkpoint holds; reads device values."""
        self._count()
        return {"total": self.total, "streak": self._streak, "spikes": self.spikes}

    def set_counts(self, saved: BadStepCounts) -> None:
        """Continue the counts of a checkpoint."""
        self.total, self._streak = saved["total"], list(saved["streak"])
        self.spikes = saved.get("spikes", 0)  # there were none before they were looked for

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """See `Callback.after_step`."""
        self._pending.append((trainer.step, result.bad, result.spike))

    def _count(self) -> None:
        """Read the flags of the steps that were not counted yet."""
        if not self._pending:
            return
        flags = torch.stack([torch.stack((bad, spike)) for _, bad, spike in self._pending]).tolist()
        for (step, *_), (bad, spike) in zip(self._pending, flags, strict=True):
            self.spikes += int(spike)
            self._streak = [*self._streak, step] if bad else []
            self.total += int(bad)
            self._longest = max(self._longest, self._streak, key=len)
        self._pending.clear()

    def at_log(self, trainer: Trainer, record: LogRecord) -> None:
        """Add `skipped` and, where spikes are skipped, `skipped_spikes`.

        Raises:
            NonFiniteError: too many steps in a row were not finite; the message has steps and samples.
        """
        self._count()
        streak, self._longest = self._longest, []
        record["skipped"] = self.total
        if trainer.config.training.skip_spikes:
            record["skipped_spikes"] = self.spikes
        if len(streak) >= self.limit:
            first, last = streak[0], streak[-1]
            samples = [samples_after(trainer.phases, step) for step in (first - 1, last)]
            raise NonFiniteError(
                f"loss or gradients were not finite in steps {first}-{last}, samples {samples[0]}-"
                f"{samples[1] - 1}: {len(streak)} steps in a row (training.max_bad_steps {self.limit}) updated "
                "nothing; the weights from before them are saved"
            )
