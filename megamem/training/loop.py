"""The training loop."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from checkpoints.saver import Saver
from megamem.config.run import RunConfig
from megamem.data.feeder import Feeder
from megamem.parallel.topology import Topology
from megamem.pipeline.base import StepResult, TrainingEngine
from megamem.pipeline.optimizer import learning_rate

SAME_SIGNAL_S = 1.0


class Callback:
    """Override what you need. `trainer.step` counts finished optimizer steps."""

    def start(self, trainer: Trainer) -> None:
        """Before the first step."""

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """After each optimizer step. Must not read device values: that makes the host wait."""

    def at_log(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """At logging steps, once `record` is filled; may read device values."""

    def finish(self, trainer: Trainer) -> None:
        """After the last step, also when the run was stopped early."""


class Trainer:
    """Runs steps until the budget is spent or a signal asks to stop. Everything optional is a callback."""

    def __init__(
        self,
        config: RunConfig,
        topology: Topology,
        engine: TrainingEngine,
        feeder: Feeder,
        callbacks: Sequence[Callback],
        watch: Callable[[str], None] = lambda action: None,
    ) -> None:
        self.config, self.topology, self.engine, self.feeder = config, topology, engine, feeder
        self.watch = watch
        """Tells the watchdog in a few words what this rank is at."""
        self.callbacks = list(callbacks)
        self.step = 0
        self.lr = 0.0
        self.data_wait = 0.0
        self.paused = 0.0
        self.stopped = False
        self.clock_says_save = False
        """This rank's clock asks for a checkpoint; after a step: some rank's did."""
        self.saver: Saver | None = None
        self._signal: int | None = None

    def fit(self) -> None:
        """Train. Raises NonFiniteError if the run had to be given up."""
        with self._signals(), self._batches() as batches:
            for callback in self.callbacks:
                callback.start(self)
            self.stopped = self._ends_early()
            while self.step < self.config.steps and not self.stopped:
                self._one_step(batches)
                self._agree()
            for callback in self.callbacks:
                callback.finish(self)

    def _ends_early(self) -> bool:
        """Whether `training.stop_after` is reached before the last step."""
        return (self.config.training.stop_after or self.config.steps) <= self.step < self.config.steps

    def _one_step(self, batches: Iterator[Any]) -> None:
        step = self.step
        self.watch(f"step {step + 1}: waiting for data")
        begun = time.monotonic()
        micro_batches = [b.to(self.topology.device) for b in itertools.islice(batches, self.engine.accumulation)]
        self.data_wait += time.monotonic() - begun
        self.lr = learning_rate(self.config.optimizer, step, self.config.steps)
        result = self.engine.step(micro_batches, self.lr, lambda what: self.watch(f"step {step + 1}: {what}"))
        self.step += 1
        for callback in self.callbacks:
            callback.after_step(self, result)

    @contextmanager
    def pause(self, what: str) -> Iterator[None]:
        """Time that does not count as training."""
        self.watch(what)
        begun = time.monotonic()
        yield
        self.paused += time.monotonic() - begun

    def _batches(self) -> Any:
        return self.feeder.prefetch(self.step, pin_memory=self.topology.device.type == "cuda")

    def _agree(self) -> None:
        """Whether any rank got a signal, its clock asks for a checkpoint, or a save has failed.

        Agreed between hosts; the devices are not asked. Raises CheckpointError on all ranks if a save failed on one.
        """
        failed = self.saver is not None and self.saver.failed()
        flags = torch.tensor([self._signal is not None, self.clock_says_save, failed], dtype=torch.int64)
        if self.topology.world_size > 1:
            dist.all_reduce(flags, dist.ReduceOp.MAX)
        stopped, self.clock_says_save, failed = (bool(flag) for flag in flags)
        self.stopped |= stopped or self._ends_early()
        if failed and self.saver is not None:
            self.saver.wait()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT ask for a stop at the next step border; a later second one acts at once.

        A job's signal may reach a rank twice, from its launcher and from whoever signals all processes of the job: what
        comes within `SAME_SIGNAL_S` is one signal.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

        first: float | None = None

        def note(number: int, frame: FrameType | None) -> None:
            nonlocal first
            first = first or time.monotonic()
            self._signal = number
            if time.monotonic() - first > SAME_SIGNAL_S:
                signal.signal(number, before[signal.Signals(number)] or signal.SIG_DFL)
                signal.raise_signal(number)

        for number in before:
            signal.signal(number, note)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler or signal.SIG_DFL)
