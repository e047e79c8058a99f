"""The callback that records how the actions of a pipeline's schedule lie in time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megamem.pipeline.record import write_record
from megamem.training.loop import Callback, Trainer

if TYPE_CHECKING:
    from megamem.pipeline.base import StepResult
    from megamem.pipeline.engine import PipelineEngine


class ScheduleRecorder(Callback):
    """Records one step action by action, on one rank of each stage."""

    def __init__(self, step: int, engine: PipelineEngine) -> None:
        """step: the one that is recorded, from 1. engine: the stage of this rank."""
        self.step, self.engine = step, engine

    def start(self, trainer: Trainer) -> None:
        """See `Callback.start`."""
        self._switch(trainer)

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """See `Callback.after_step`."""
        self._switch(trainer)

    def _switch(self, trainer: Trainer) -> None:
        """Begin before the step, end after it. While it records, the host waits for the device around each action."""
        topology, executor = trainer.topology, self.engine.executor
        if topology.dp_rank or topology.tp_rank:
            return
        if trainer.step == self.step - 1:
            executor.events = []
        elif executor.events is not None:
            write_record(trainer.config.run_folder, topology.pp_rank, topology.pp_size, executor.events)
            executor.events = None
