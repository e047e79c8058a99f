"""The callback that traces some steps with torch.profiler."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megamem.training.loop import Callback, Trainer

if TYPE_CHECKING:
    from megamem.pipeline.base import StepResult


class Profiler(Callback):
    """A torch.profiler trace of some steps, one Chrome trace per rank."""

    def __init__(self, first: int, last: int, folder: Path) -> None:
        """first, last: steps of the trace, from 1. folder: where `trace-rankN.json` goes."""
        self.first, self.last, self.folder = first, last, folder
        self._profile: torch.profiler.profile | None = None

    def start(self, trainer: Trainer) -> None:
        """See `Callback.start`."""
        if trainer.step == self.first - 1:
            self._begin()

    def _begin(self) -> None:
        # the profiler's library writes a line to stderr at each start and stop
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        self._profile = torch.profiler.profile(record_shapes=True)
        self._profile.__enter__()

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """See `Callback.after_step`."""
        if trainer.step == self.first - 1:
            self._begin()
        elif trainer.step == self.last:
            self._end(trainer)

    def finish(self, trainer: Trainer) -> None:
        """See `Callback.finish`."""
        self._end(trainer)

    def _end(self, trainer: Trainer) -> None:
        """Write the trace, if one is being taken."""
        if self._profile is None:
            return
        self._profile.__exit__(None, None, None)
        self._profile.export_chrome_trace(str(self.folder / f"trace-rank{trainer.topology.rank}.json"))
        self._profile = None
