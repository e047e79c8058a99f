"""The most a rank holds at once: its schedule played through with the bytes of its layers' activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megamem.config.run import RunConfig
from megamem.memory.base import DTYPES
from megamem.pipeline.schedule import Order, stage_order
from megamem.planning.activations import Activations, PartBytes, Share

AHEAD = 2
"""Receives that are posted before they are needed (`megamem.pipeline.channels.Inbox`)."""


@dataclass(frozen=True)
class ActivationPeak:
    """Bytes of a rank of one stage."""

    in_flight: float
    """Kept for backward passes to come, at the moment when most is held."""
    working: float
    """What the chunk at work takes besides at that moment."""
    borders: float
    """Hidden chunks and gradients that travel between stages."""

    @property
    def total(self) -> float:
        """Bytes of all."""
        return self.in_flight + self.working + self.borders


def activation_peak(
    config: RunConfig, found: Activations, layers: range, stage: int, tp_size: int, sequences: int
) -> ActivationPeak:
    """Of a rank that holds `layers` as `stage` of `config.parallel.pp`, with `sequences` micro-batches a step."""
    parallel, model, rows = config.parallel, config.model, config.training.micro_batch_size
    share = Share(rows, tp_size, config.training.recompute, parallel.sequence_parallel and tp_size > 1)
    parts = [found.layer(layer, share) for layer in layers]
    if stage == 0:
        parts.insert(0, found.embedding(share))
    if stage == parallel.pp - 1:
        parts.append(found.head(share))
    split = tp_size if parallel.sequence_parallel else 1
    hidden = model.chunk_size // split * rows * model.hidden_size * DTYPES[config.training.precision].itemsize
    entered = hidden if stage else 0
    # after so many sequences the schedule repeats itself
    steady = -(-(parallel.pp + config.bptt_chunks) // config.chunks) + 2
    order = stage_order(stage, parallel.pp, min(sequences, steady), config.chunks, config.bptt_chunks)
    in_flight, working = _play(order, parts, entered, config.bptt_chunks)
    neighbours = (stage > 0) + (stage < parallel.pp - 1)
    pending = parallel.pp + 1  # sends under way (`Outbox`)
    return ActivationPeak(in_flight, working, neighbours * (AHEAD + pending) * hidden)


def _play(order: Order, parts: Sequence[Sequence[PartBytes]], entered: float, bptt_chunks: int) -> tuple[float, float]:
    """(bytes in flight, bytes of the chunk at work) at the moment when their sum is largest."""
    live, most = 0.0, (0.0, 0.0)
    handed: dict[int, float] = {}
    for action in order:
        here = [part[action.chunk] for part in parts]
        if action.kind == "forward":
            working = _forward(here) + entered
            most = max(most, (live, working), key=sum)
            live += entered + sum(part.kept for part in here)
            continue
        most = max(most, (live, _backward(here)), key=sum)
        live -= entered + sum(part.kept for part in here) + handed.pop(action.sequence, 0.0)
        if action.chunk % bptt_chunks:
            handed[action.sequence] = sum(part.handed_back for part in here)
            live += handed[action.sequence]
    return most


def _forward(parts: Sequence[PartBytes]) -> float:
    """Most while a chunk passes up, above what there was before."""
    before = most = 0.0
    for part in parts:
        most = max(most, before + part.forward)
        before += part.kept
    return most


def _backward(parts: Sequence[PartBytes]) -> float:
    """Most while a chunk's gradient passes down, above what there was before: parts that are through hold nothing."""
    before = most = 0.0
    for part in reversed(parts):
        most = max(most, before + part.backward)
        before += part.handed_back - part.kept
    return most
