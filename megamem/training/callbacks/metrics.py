"""The callbacks that measure: the record of each log line, and the speed over a whole run."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megamem.runs.sinks.base import LogRecord, Sink
from megamem.training.loop import Callback, Trainer, has_log_line
from megamem.training.phases import positions_after

if TYPE_CHECKING:
    from megamem.parallel.topology import Topology
    from megamem.pipeline.base import StepResult


class Metrics(Callback):
    """Fills and writes a record every `every` steps: the only moments the host waits for the device."""

    def __init__(self, every: int, sinks: Sequence[Sink], flops_per_token: Sequence[float], peak: float | None) -> None:
        """Describe what is measured.

        Args:
            every: steps between log lines; the first step and the last one of each phase have one too.
            sinks: where records go; none on ranks other than 0.
            flops_per_token: of forward and backward pass, in each phase. What padding costs is no use: it counts as
                none.
            peak: FLOPs per second that the device can reach; None where it is not known, and MFU is not.
        """
        self.every = every
        self.sinks = sinks
        self.flops_per_token = flops_per_token
        self.peak = peak

    def start(self, trainer: Trainer) -> None:
        """See `Callback.start`."""
        self._begun = time.monotonic()
        self._reset(trainer)

    def _reset(self, trainer: Trainer) -> None:
        """Begin the interval of the next log line."""
        self._since, self._from_step, self._waited = time.monotonic(), trainer.step, trainer.data_wait
        self._paused, self._from_tokens = trainer.paused, trainer.tokens
        self._nats: Tensor | None = None
        self._predicted: Tensor | None = None

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """See `Callback.after_step`. A skipped step's loss would make the mean useless; it counts as nothing."""
        keep = result.bad == 0
        nats = torch.where(keep, result.loss_sum, 0.0)
        predicted = torch.where(keep, result.predicted, 0.0)
        self._nats = nats if self._nats is None or self._predicted is None else self._nats + nats
        self._predicted = predicted if self._predicted is None else self._predicted + predicted
        if not has_log_line(trainer.step, self.every, trainer.phase.end):
            return
        record = self._record(trainer, result)
        try:
            for callback in trainer.callbacks:
                callback.at_log(trainer, record)
        finally:
            # the record of a step that ends the run is written too
            for sink in self.sinks:
                sink.write(record)
        self._reset(trainer)

    def _record(self, trainer: Trainer, result: StepResult) -> LogRecord:
        """Return the figures since the last log line. A collective of the data-parallel ranks."""
        assert self._nats is not None
        assert self._predicted is not None
        dist.all_reduce(self._nats, group=trainer.topology.dp_group)
        nats, predicted = torch.stack((self._nats, self._predicted)).tolist()
        config, steps = trainer.config, trainer.step - self._from_step
        now = time.monotonic()
        seconds = max(now - self._since - (trainer.paused - self._paused), 1e-9)
        tokens = trainer.tokens - self._from_tokens
        positions = positions_after(trainer.phases, trainer.step) - positions_after(trainer.phases, self._from_step)
        tokens_per_second = tokens / seconds
        per_device = tokens_per_second / trainer.topology.world_size
        norm = result.grad_norm
        return {
            "step": trainer.step,
            **({"phase": trainer.phase.number + 1} if len(trainer.phases) > 1 else {}),
            "tokens": trainer.tokens,
            "loss": nats / predicted if predicted else float("nan"),
            "grad_norm": None if norm is None else float(norm),
            "lr": trainer.lr,
            "tokens_per_second": tokens_per_second,
            "tokens_per_second_per_device": per_device,
            "mfu": per_device * self.flops_per_token[trainer.phase.number] / self.peak if self.peak else None,
            "padding": 1 - tokens / positions,
            "data_wait": (trainer.data_wait - self._waited) / seconds,
            "memory_gib": max(peak_memory_by_rank(trainer.topology)) / 2**30,
            "eta_s": (config.steps - trainer.step) * seconds / max(steps, 1),
            "elapsed_s": now - self._begun,
        }


class Throughput(Callback):
    """Remembers the speed at each log line, for the result of the run."""

    def __init__(self) -> None:
        """Begin without any."""
        self._rates: list[float] = []

    def at_log(self, trainer: Trainer, record: LogRecord) -> None:
        """See `Callback.at_log`."""
        self._rates.append(record["tokens_per_second"] or 0.0)

    def tokens_per_second(self) -> float:
        """Return the median over log lines, the first (warm-up) left out where there are others."""
        rates = self._rates[1:] or self._rates
        return statistics.median(rates) if rates else 0.0


def peak_memory(device: torch.device) -> int:
    """Return peak bytes: of the device's allocator on CUDA, else this process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_memory_by_rank(topology: Topology) -> list[float]:
    """Return `peak_memory` of every rank, on every rank. A collective; the host waits for the device."""
    peaks = torch.zeros(topology.world_size, dtype=torch.float64, device=topology.device)
    peaks[topology.rank] = peak_memory(topology.device)
    dist.all_reduce(peaks)
    return [float(peak) for peak in peaks.tolist()]
