"""The most a rank holds at once: its schedule played through with the bytes of its layers' activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megamem.config.run import RunConfig
from megamem.memory.base import DTYPES
from megamem.pipeline.schedule import Order, stage_order
from megamem.planning.activations import Activations, PartBytes, Share
from megamem.planning.state import state_bytes, state_sizes

AHEAD = 2
"""Receives that are posted before they are needed (`megamem.pipeline.channels.Inbox`)."""


@dataclass(frozen=True)
class ActivationPeak:
    """Bytes of a rank of one stage."""

    in_flight: float
    """Kept for backward passes to come, at the moment when most is held."""
    working: float
    """What the chunk at work takes besides at that moment."""
    states: float
    """Memory states that the oldest chunk in flight has read: what later ones wrote is among what they keep."""
    borders: float
    """Hidden chunks and gradients that travel between stages."""

    @property
    def total(self) -> float:
        """Bytes of all."""
        return self.in_flight + self.working + self.states + self.borders


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
    read = [_state_bytes(config, layers, tp_size, chunk) for chunk in range(config.chunks)]
    in_flight, working, states = _play(order, parts, entered, read, config.bptt_chunks)
    neighbours = (stage > 0) + (stage < parallel.pp - 1)
    pending = parallel.pp + 1  # sends under way (`Outbox`)
    return ActivationPeak(in_flight, working, states, neighbours * (AHEAD + pending) * hidden)


def _state_bytes(config: RunConfig, layers: range, tp_size: int, chunks: int) -> int:
    """Of the layers' states once a micro-batch's sequences are read so far."""
    model, dtype = config.model, DTYPES[config.training.precision]
    sizes = state_sizes(model, config.training.micro_batch_size)
    kinds = (state_bytes(model.mixer_at(i).state_specs(model), sizes, dtype, tp_size, chunks) for i in layers)
    return sum(sum(kind.values()) for kind in kinds)


def _play(
    order: Order, parts: Sequence[Sequence[PartBytes]], entered: float, read: Sequence[int], bptt_chunks: int
) -> tuple[float, float, float]:
    """(bytes in flight, of the chunk at work, of states) at the moment when their sum is largest.

    Args:
        parts: of the stage, in order; by chunk.
        entered: bytes of the hidden chunk that comes in.
        read: bytes of the states that each chunk reads.
    """
    live, most = 0.0, (0.0, 0.0, 0.0)
    handed: dict[int, float] = {}
    oldest: dict[int, list[int]] = {}
    for action in order:
        here = [part[action.chunk] for part in parts]
        chunks = oldest.setdefault(action.sequence, [])
        if action.kind == "forward":
            chunks.append(action.chunk)
        states = float(sum(read[min(chunks)] for chunks in oldest.values() if chunks))
        if action.kind == "forward":
            most = max(most, (live, _forward(here) + entered, states), key=sum)
            live += entered + sum(part.kept for part in here)
            continue
        most = max(most, (live, _backward(here), states), key=sum)
        chunks.remove(action.chunk)
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
