"""The most a rank holds at once: its schedule played through with the bytes of its layers' activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megamem.config.run import RunConfig
from megamem.costs.state_bytes import stage_state_bytes
from megamem.memory.base import DTYPES
from megamem.pipeline.channels import Inbox
from megamem.pipeline.deepspeed_settings import BUCKET, LIVE
from megamem.pipeline.schedule import Action, Order, stage_order, window_schedule
from megamem.planning.activations import Activations, PartBytes, Share
from megamem.planning.ranks import part_parameters

FLAT = 500_000_000
"""Elements that DeepSpeed copies together to sum gradients outside of ZeRO 2 and 3 (`MEMORY_OPT_ALLREDUCE_SIZE`)."""


@dataclass(frozen=True)
class StepPeak:
    """Bytes of a rank of one stage at the moment when most is held, besides its weights and its optimizer's state."""

    gradients: float
    """Sums of gradients that there are by then."""
    in_flight: float
    """Activations kept for backward passes to come."""
    working: float
    """What the chunk at work takes besides; if the moment is after the last chunk, what reduction and update take."""
    states: float
    """Memory states that the oldest chunk in flight has read: what later ones wrote is among what they keep. With
    streams also those of all micro-batches."""
    borders: float
    """Hidden chunks and gradients that travel between stages."""
    gathered: float
    """Under ZeRO 3: weights of other ranks, and the buffer through which gradients leave."""

    @property
    def total(self) -> float:
        """Bytes of all."""
        return self.gradients + self.in_flight + self.working + self.states + self.borders + self.gathered


@dataclass(frozen=True)
class _Gradients:
    """How a layout keeps gradients, bytes."""

    by_part: Sequence[float]
    """That a backward pass makes, for each part of the stage, in order."""
    sums: float
    """Over the passes of a step, where they are kept elsewhere than where a pass makes them."""
    lasting: bool
    """Whether those are there before the first pass too."""
    stay: bool
    """Whether what a pass made is itself the sum; if not, it goes when the pass is over."""
    whole_window: bool
    """Whether one pass goes through all chunks of a window: it hands gradients over when its first chunk is done."""
    handing_over: float
    """Taken while they are handed over."""


def step_peak(config: RunConfig, found: Activations, layers: range, stage: int, tp_size: int, dp_size: int) -> StepPeak:
    """Of a rank that holds `layers` as `stage` of `config.parallel.pp`."""
    parallel, model, rows = config.parallel, config.model, config.training.micro_batch_size
    share = Share(rows, tp_size, config.training.recompute, parallel.sequence_parallel and tp_size > 1)
    counts = part_parameters(model, tp_size)
    parts = [found.layer(layer, share) for layer in layers]
    sizes = [counts.layers[layer] for layer in layers]
    if stage == 0:
        parts.insert(0, found.embedding(share))
        sizes.insert(0, counts.embedding)
    if stage == parallel.pp - 1:
        parts.append(found.head(share))
        sizes.append(counts.head + counts.tied)  # a tied matrix gets its gradient at the head first
        if stage == 0:
            sizes[0] -= counts.tied
    element = DTYPES[config.training.precision].itemsize
    split = tp_size if parallel.sequence_parallel else 1
    hidden = model.layer_model.chunk_size // split * rows * model.hidden_size * element
    # after so many micro-batches the schedule repeats itself
    repeats = 2 * parallel.pp if config.interleaved else -(-(parallel.pp + config.bptt_chunks) // config.chunks) + 2
    order = _order(config, stage, min(config.accumulation_steps(dp_size), repeats))
    read = [_state_bytes(config, layers, tp_size, chunk) for chunk in range(config.chunks)]
    gradients = _gradients(config, sizes, dp_size)
    at_work = _play(order, parts, hidden if stage else 0, read, config.bptt_chunks, gradients)
    neighbours = (stage > 0) + (stage < parallel.pp - 1)
    pending = parallel.pp + 1  # sends under way (`Outbox`)
    borders = float(neighbours * (Inbox.AHEAD + pending) * hidden)
    gathered = buffer = 0.0
    if parallel.zero_stage == 3:
        buffer = 4.0 * min(sum(sizes), BUCKET)
        gathered = buffer + (float(min(sum(sizes), LIVE) * element) if dp_size > 1 else 0.0)
    sums = gradients.sums or sum(gradients.by_part)
    carried = _carried(config, read[-1], dp_size)
    ending = StepPeak(sums, 0.0, _ending(config, sum(sizes), dp_size), carried, 0.0, buffer)
    most, in_flight, working, states = at_work
    at_work_peak = StepPeak(most, in_flight, working, states + carried, borders, gathered)
    return max(at_work_peak, ending, key=lambda peak: peak.total)


def _order(config: RunConfig, stage: int, micro_batches: int) -> Order:
    """What the stage does; without a pipeline whole windows, forward and then backward (`WindowEngine`)."""
    stages, chunks, bptt_chunks = config.parallel.pp, config.chunks, config.bptt_chunks
    if stages > 1:
        return stage_order(stage, stages, micro_batches, chunks, bptt_chunks, config.interleaved)
    order: Order = []
    for window in window_schedule(micro_batches, chunks, bptt_chunks):
        order += [Action("forward", window.micro_batch, chunk) for chunk in window.chunks]
        order += [Action("backward", window.micro_batch, chunk) for chunk in reversed(window.chunks)]
    return order


def _gradients(config: RunConfig, sizes: Sequence[int], dp_size: int) -> _Gradients:
    zero, total = config.parallel.zero_stage, sum(sizes)
    element = DTYPES[config.training.precision].itemsize
    bucket = min(total, BUCKET) * 4.0 if zero == 2 else 0.0
    divided = -(-total // dp_size)
    return _Gradients(
        by_part=[float(size * element) for size in sizes],
        sums=0.0 if element == 4 and zero < 2 else 4.0 * (divided if zero >= 2 else total),
        lasting=zero == 3 or (zero == 1 and element < 4),
        stay=element == 4 and zero < 2,
        whole_window=config.parallel.pp == 1,
        handing_over=bucket + element * divided if zero >= 2 else 0.0,
    )


def _ending(config: RunConfig, total: int, dp_size: int) -> float:
    """Taken after the last backward pass besides gradients: a flat copy of them, summed or updated from."""
    mixed = DTYPES[config.training.precision].itemsize < 4
    if config.parallel.zero_stage == 0:
        return min(total, FLAT) * 4.0
    summed = min(total, FLAT) * 4.0 if config.parallel.zero_stage == 1 and mixed and dp_size > 1 else 0.0
    return max(summed, -(-total // dp_size) * 4.0)


def _carried(config: RunConfig, states: int, dp_size: int) -> float:
    """States that go from step to step with streams: old and new ones of all micro-batches, and one being chosen."""
    if config.data.feeding != "streams":
        return 0.0
    return float((2 * config.accumulation_steps(dp_size) + 1) * states)


def _state_bytes(config: RunConfig, layers: range, tp_size: int, chunks: int) -> int:
    """Of the layers' states once a micro-batch's sequences are read so far."""
    rows, dtype = config.training.micro_batch_size, DTYPES[config.training.precision]
    return sum(stage_state_bytes(config.model, layers, rows, dtype, tp_size, chunks).values())


def _play(
    order: Order,
    parts: Sequence[Sequence[PartBytes]],
    entered: float,
    read: Sequence[int],
    bptt_chunks: int,
    gradients: _Gradients,
) -> tuple[float, float, float, float]:
    """(bytes of gradients, in flight, of the chunk at work, of states) at the moment when their sum is largest.

    Args:
        parts: of the stage, in order; by chunk.
        entered: bytes of the hidden chunk that comes in.
        read: bytes of the states that each chunk reads.
    """
    live, made, most = 0.0, 0.0, (0.0, 0.0, 0.0, 0.0)
    sums = gradients.sums if gradients.lasting else 0.0
    handed: dict[int, float] = {}
    oldest: dict[int, list[int]] = {}
    for action in order:
        here = [part[action.chunk] for part in parts]
        chunks = oldest.setdefault(action.micro_batch, [])
        if action.kind == "forward":
            chunks.append(action.chunk)
        states = float(sum(read[min(chunks)] for chunks in oldest.values() if chunks))
        if action.kind == "forward":
            most = max(most, (sums + made, live, _forward(here) + entered, states), key=sum)
            live += entered + sum(part.kept for part in here)
            continue
        begins = not gradients.whole_window or (action.chunk + 1) % bptt_chunks == 0
        ends = not gradients.whole_window or action.chunk % bptt_chunks == 0
        # a pass adds to the sums of another in place, but a window's own are there beside them
        own = not gradients.stay or (gradients.whole_window and bptt_chunks > 1)
        new = gradients.by_part if begins and (own or not sums) else None
        most = max(most, (sums + made, live, _backward(here, new), states), key=sum)
        made += sum(new or [])
        chunks.remove(action.chunk)
        live -= entered + sum(part.kept for part in here) + handed.pop(action.micro_batch, 0.0)
        if ends:
            sums, made = max(sums, made if gradients.stay else gradients.sums), 0.0
            most = max(most, (sums, live, gradients.handing_over, states), key=sum)
        if action.chunk % bptt_chunks:
            handed[action.micro_batch] = sum(part.handed_back for part in here)
            live += handed[action.micro_batch]
    return most


def _forward(parts: Sequence[PartBytes]) -> float:
    """Most while a chunk passes up, above what there was before."""
    before = most = 0.0
    for part in parts:
        most = max(most, before + part.forward)
        before += part.kept
    return most


def _backward(parts: Sequence[PartBytes], gradients: Sequence[float] | None) -> float:
    """Most while a chunk's gradient passes down, above what there was before: parts that are through hold nothing.

    gradients: bytes of what each part's parameters get, if there is no room for them yet.
    """
    before = most = 0.0
    for part, new in zip(reversed(parts), reversed(gradients or [0.0] * len(parts)), strict=True):
        most = max(most, before + part.backward + new)
        before += part.handed_back - part.kept + new
    return most
