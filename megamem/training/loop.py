"""The training loop, and the interface of its callbacks.

The libraries of parallel training are not imported here, so that a configuration that names callbacks is parsed
without them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megamem.config.run import RunConfig
from megamem.pipeline.optimizer import learning_rate
from megamem.runs.sinks.base import LogRecord
from megamem.training.phases import phase_after, phases_of
from megamem.training.signals import noted_signals

if TYPE_CHECKING:
    from checkpoints.saver import Saver
    from megamem.data.batch import Batch
    from megamem.data.feeder import Feeder
    from megamem.data.prefetch import Prefetcher
    from megamem.parallel.topology import Topology
    from megamem.pipeline.base import StepResult, TrainingEngine


def has_log_line(step: int, every: int, end: int) -> bool:
    """Return whether a step has a log line: the first, each `every`th, and `end`, the last of its phase.

    step: finished steps once it is made.
    """
    return step % every == 0 or step in {1, end}


class Callback:
    """Something that happens around training steps; every rank runs it. Override what you need.

    `trainer.step` counts finished optimizer steps.
    """

    def start(self, trainer: Trainer) -> None:
        """Act before the first step, once a resumed run is where its checkpoint was saved."""

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Act after each optimizer step. Reading values of device tensors here makes the host wait in every step."""

    def at_log(self, trainer: Trainer, record: LogRecord) -> None:
        """Read or extend the record of a log line, on every rank; device values may be read here."""

    def finish(self, trainer: Trainer) -> None:
        """Act after the last step, also when the run was stopped early."""


class Trainer:
    """Runs steps until the budget is spent or a signal asks to stop. Everything optional is a callback."""

    def __init__(
        self,
        config: RunConfig,
        topology: Topology,
        engine: TrainingEngine,
        feeders: Sequence[Feeder],
        callbacks: Sequence[Callback],
        watch: Callable[[str], None] = lambda action: None,
    ) -> None:
        """Put the parts of a run together.

        Args:
            config: the run.
            topology: this rank among the others.
            engine: computes one step.
            feeders: give the micro-batches of this rank, one in each phase.
            callbacks: what else happens, in this order.
            watch: called with what this rank does next, in a few words.
        """
        self.config, self.topology, self.engine, self.feeders = config, topology, engine, tuple(feeders)
        self.phases = phases_of(config)
        """The phases of the run, one for each feeder."""
        self.phase = self.phases[0]
        """The phase of the last step."""
        self.watch = watch
        """Notes for the watchdog what this rank does next, in a few words."""
        self.callbacks = list(callbacks)
        """In the order they act."""
        self.step = 0
        """Finished optimizer steps."""
        self.lr = 0.0
        """Learning rate of the last step."""
        self.data_wait = 0.0
        """Seconds spent waiting for data so far."""
        self.paused = 0.0
        """Seconds that do not count as training: validations and waits for checkpoints."""
        self.stopped = False
        """The run ends before its last step."""
        self.save_due = False
        """True where it is time for a checkpoint by this rank's clock; after a step: by the clock of some rank."""
        self.saver: Saver | None = None
        """Writes checkpoints; a save that fails on one rank ends all."""
        self._signaled = False
        self._counted = 0
        self._uncounted: Tensor | None = None

    @property
    def tokens(self) -> int:
        """Tokens trained on since the run began, over all ranks, without padding. The host waits for the device."""
        if self._uncounted is not None:
            self._counted += int(self._uncounted)
            self._uncounted = None
        return self._counted

    def go_on(self, step: int, tokens: int) -> None:
        """Go on after `step` finished steps and `tokens` tokens."""
        self.step, self._counted, self._uncounted = step, tokens, None

    def fit(self) -> None:
        """Train to the last step or to a signal. Raises NonFiniteError if the run had to be given up."""
        with noted_signals(self._note_signal):
            self.phase = phase_after(self.phases, self.step)
            for callback in self.callbacks:
                callback.start(self)
            self.stopped = self._ends_early()
            while self.step < self.config.steps and not self.stopped:
                self._train_phase()
            for callback in self.callbacks:
                callback.finish(self)
            self._agree()  # a signal that came during the last save is not lost

    def _train_phase(self) -> None:
        """Train to the end of the phase that the run is in, or until it is stopped."""
        self.phase = phase = phase_after(self.phases, self.step)
        if len(self.phases) > 1:
            self.engine.begin_phase(phase.config)
        if self.step == phase.first_step and self.engine.spikes is not None:
            # losses of other data say nothing of these
            self.engine.spikes.clear()
        with self._batches() as batches:
            while self.step < phase.end and not self.stopped:
                self._one_step(batches)
                self._agree()

    def _ends_early(self) -> bool:
        """Return whether `training.stop_after` is reached before the last step."""
        return (self.config.training.stop_after or self.config.steps) <= self.step < self.config.steps

    def _one_step(self, batches: Iterator[Batch]) -> None:
        """Read the micro-batches of a step, update the weights, and run the callbacks."""
        step = self.step
        self.watch(f"step {step + 1}: waiting for data")
        started = time.monotonic()
        micro_batches = [b.to(self.topology.device) for b in itertools.islice(batches, self.engine.accumulation)]
        self.data_wait += time.monotonic() - started
        self.lr = learning_rate(self.config.optimizer, step, self.config.steps)
        result = self.engine.step(micro_batches, self.lr, lambda what: self.watch(f"step {step + 1}: {what}"), step)
        self.step += 1
        # the sum of whole numbers is exact in float64 up to 2^53 tokens between two looks
        self._uncounted = result.tokens if self._uncounted is None else self._uncounted + result.tokens
        for callback in self.callbacks:
            callback.after_step(self, result)

    @contextmanager
    def pause(self, action: str) -> Iterator[None]:
        """Take the time of a block out of the training's. action: what the watchdog shows meanwhile."""
        self.watch(action)
        started = time.monotonic()
        yield
        self.paused += time.monotonic() - started

    def _batches(self) -> Prefetcher:
        feeder, step = self.feeders[self.phase.number], self.step - self.phase.first_step
        return feeder.prefetch(step, pin_memory=self.topology.device.type == "cuda")

    def _agree(self) -> None:
        """Share whether any rank got a signal, finds it time for a checkpoint, or has failed to save one.

        Hosts agree by one small all-reduce of their own; no device has to be waited for.

        Raises:
            CheckpointError: a save failed on some rank; raised on all.
        """
        failed = self.saver is not None and self.saver.failed()
        flags = torch.tensor([self._signaled, self.save_due, failed], dtype=torch.int64)
        if self.topology.world_size > 1:
            dist.all_reduce(flags, dist.ReduceOp.MAX)
        stopped, self.save_due, failed = (bool(flag) for flag in flags)
        self.stopped |= stopped or self._ends_early()
        if failed and self.saver is not None:
            self.saver.wait()

    def _note_signal(self) -> None:
        """Remember that a signal asks for a stop at the next step border."""
        self._signaled = True
