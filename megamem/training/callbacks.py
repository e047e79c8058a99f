"""What happens around the training steps: a callback has a method for each moment; all ranks run all of them."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megamem.errors import NonFiniteError
from megamem.parallel.topology import Topology
from megamem.pipeline.base import StepResult
from megamem.pipeline.engine import PipelineEngine
from megamem.pipeline.record import write_record
from megamem.runs.sinks import Sink
from megamem.training.loop import Callback, Trainer


class BadSteps(Callback):
    """Counts steps skipped for non-finite values and gives up after too many in a row; looks at logging steps only."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0
        self._pending: list[tuple[int, Tensor]] = []
        self._streak: list[int] = []
        self._worst: list[int] = []

    def counters(self) -> dict[str, Any]:
        """For a checkpoint; reads device values."""
        self._count()
        return {"total": self.total, "streak": self._streak}

    def set_counters(self, saved: dict[str, Any]) -> None:
        """Go on counting from a checkpoint's."""
        self.total, self._streak = saved["total"], list(saved["streak"])

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """See `Callback.after_step`."""
        self._pending.append((trainer.step, result.bad))

    def _count(self) -> None:
        """Look at the steps that were not looked at yet."""
        if not self._pending:
            return
        flags = torch.stack([bad for _, bad in self._pending]).tolist()
        for (step, _), bad in zip(self._pending, flags, strict=True):
            self._streak = [*self._streak, step] if bad else []
            self.total += int(bad)
            self._worst = max(self._worst, self._streak, key=len)
        self._pending.clear()

    def at_log(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """Add `skipped`; raise NonFiniteError with steps and samples if as many as allowed were bad in a row."""
        self._count()
        worst, self._worst = self._worst, []
        record["skipped"] = self.total
        if len(worst) >= self.limit:
            first, last, rows = worst[0], worst[-1], trainer.config.global_rows
            raise NonFiniteError(
                f"loss or gradients were not finite in steps {first}-{last}, samples {(first - 1) * rows}-"
                f"{last * rows - 1}: {len(worst)} steps in a row (training.max_bad_steps {self.limit}) updated "
                "nothing; the weights from before them are saved"
            )


class Metrics(Callback):
    """Fills and writes a record every `every` steps: the only moments the host waits for the device."""

    def __init__(self, every: int, sinks: Sequence[Sink], flops_per_token: float, peak: float | None) -> None:
        self.every = every
        self.sinks = sinks
        self.flops_per_token = flops_per_token
        self.peak = peak
        self.tokens_per_second = 0.0

    def start(self, trainer: Trainer) -> None:
        """See `Callback.start`."""
        self._begun = time.monotonic()
        self._reset(trainer)

    def _reset(self, trainer: Trainer) -> None:
        self._since, self._from_step, self._waited = time.monotonic(), trainer.step, trainer.data_wait
        self._paused = trainer.paused
        self._nats: Tensor | None = None
        self._predicted: Tensor | None = None

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """See `Callback.after_step`. A skipped step's loss would make the mean useless; it counts as nothing."""
        keep = result.bad == 0
        nats = torch.where(keep, result.loss_sum, 0.0)
        predicted = torch.where(keep, result.predicted, 0.0)
        self._nats = nats if self._nats is None or self._predicted is None else self._nats + nats
        self._predicted = predicted if self._predicted is None else self._predicted + predicted
        if trainer.step % self.every and trainer.step != trainer.config.steps and trainer.step != 1:
            return
        record = self._record(trainer, result)
        try:
            for callback in trainer.callbacks:
                callback.at_log(trainer, record)
        finally:  # the record of a step that ends the run is written too
            for sink in self.sinks:
                sink.write(record)
        self._reset(trainer)

    def _record(self, trainer: Trainer, result: StepResult) -> dict[str, Any]:
        assert self._nats is not None
        assert self._predicted is not None
        dist.all_reduce(self._nats, group=trainer.topology.dp_group)
        nats, predicted = torch.stack((self._nats, self._predicted)).tolist()
        config, steps = trainer.config, trainer.step - self._from_step
        now = time.monotonic()
        seconds = max(now - self._since - (trainer.paused - self._paused), 1e-9)
        rate = steps * config.training.batch_tokens / seconds
        self.tokens_per_second = rate
        per_device = rate / trainer.topology.world_size
        norm = result.grad_norm
        return {
            "step": trainer.step,
            "tokens": trainer.step * config.training.batch_tokens,
            "loss": nats / predicted if predicted else float("nan"),
            "grad_norm": None if norm is None else float(norm),
            "lr": trainer.lr,
            "tokens_per_second": rate,
            "tokens_per_second_per_device": per_device,
            "mfu": per_device * self.flops_per_token / self.peak if self.peak else None,
            "data_wait": (trainer.data_wait - self._waited) / seconds,
            "memory_gib": max(peak_memory_by_rank(trainer.topology)) / 2**30,
            "eta_s": (config.steps - trainer.step) * seconds / max(steps, 1),
            "elapsed_s": now - self._begun,
        }


def peak_memory(device: torch.device) -> int:
    """Peak bytes: of the device's allocator on CUDA, else this process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_memory_by_rank(topology: Topology) -> list[float]:
    """`peak_memory` of every rank, on every rank. A collective; the host waits for the device."""
    peaks = torch.zeros(topology.world_size, dtype=torch.float64, device=topology.device)
    peaks[topology.rank] = peak_memory(topology.device)
    dist.all_reduce(peaks)
    return [float(peak) for peak in peaks.tolist()]


class Validation(Callback):
    """Held-out losses every `every` steps, written as a record of their own."""

    def __init__(self, every: int, evaluate: Callable[[], dict[str, Any]], sinks: Sequence[Sink]) -> None:
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
        self.last = trainer.step, losses["val_loss"]
        record = {"step": trainer.step, "tokens": trainer.step * trainer.config.training.batch_tokens, **losses}
        for sink in self.sinks:
            sink.write(record)


class Profiler(Callback):
    """A torch.profiler trace of some steps, one Chrome trace per rank."""

    def __init__(self, first: int, last: int, folder: Path) -> None:
        self.first, self.last, self.folder = first, last, folder
        self._profile: Any = None

    def start(self, trainer: Trainer) -> None:
        """See `Callback.start`."""
        if trainer.step == self.first - 1:
            self._begin()

    def _begin(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it writes a line to stderr at each start and stop
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
        if self._profile is None:
            return
        self._profile.__exit__(None, None, None)
        self._profile.export_chrome_trace(str(self.folder / f"trace-rank{trainer.topology.rank}.json"))
        self._profile = None


class ScheduleRecorder(Callback):
    """Records one step action by action, on one rank of each stage."""

    def __init__(self, step: int, engine: PipelineEngine) -> None:
        self.step, self.engine = step, engine

    def start(self, trainer: Trainer) -> None:
        """See `Callback.start`."""
        self.after_step(trainer, None)

    def after_step(self, trainer: Trainer, result: StepResult | None) -> None:
        """See `Callback.after_step`. While it records, the host waits for the device around each action."""
        topology, executor = trainer.topology, self.engine.executor
        if topology.dp_rank or topology.tp_rank:
            return
        if trainer.step == self.step - 1:
            executor.events = []
        elif executor.events is not None:
            write_record(trainer.config.run_folder, topology.pp_rank, topology.pp_size, executor.events)
            executor.events = None
