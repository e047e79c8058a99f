"""The callback that measures held-out losses while training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from megamem.runs.sinks.base import LogRecord, Sink
from megamem.training.loop import Callback, Trainer

if TYPE_CHECKING:
    from megamem.pipeline.base import StepResult


class Validation(Callback):
    """Held-out losses every `every` steps, written as a record of their own."""

    def __init__(self, every: int, evaluate: Callable[[], LogRecord], sinks: Sequence[Sink]) -> None:
        """Describe what is measured.

        Args:
            every: steps between validations.
            evaluate: gives the losses, `val_loss` among them; a collective of all ranks.
            sinks: where records go; none on ranks other than 0.
        """
        self.every = every
        self.evaluate = evaluate
        self.sinks = sinks
        self.last: tuple[int, float] | None = None
        """Step and loss of the last validation."""

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """See `Callback.after_step`. A validation is a pause: its time is not the training's."""
        if not self.every or trainer.step % self.every:
            return
        with trainer.pause(f"validation after step {trainer.step}"):
            losses = self.evaluate()
        loss = losses["val_loss"]
        assert loss is not None
        self.last = trainer.step, loss
        record = {"step": trainer.step, "tokens": trainer.tokens, **losses}
        for sink in self.sinks:
            sink.write(record)
