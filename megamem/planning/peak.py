"""The most bytes that a rank holds at once: its schedule is played through with the bytes of its layers' activations.

`step_peak` collects what the stage's parts take (`megamem.planning.activations`), how the layout keeps gradients and
what other things there are besides, then `_play` walks through the schedule and remembers the moment that holds most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megamem.config.run import RunConfig
from megamem.costs.state_bytes import component_bytes
from megamem.memory.base import DTYPES
from megamem.pipeline.deepspeed_settings import BUCKET, LIVE
from megamem.pipeline.freezing import learning_of
from megamem.pipeline.program import POSTED
from megamem.pipeline.schedule import Action, Order, stage_order, window_schedule
from megamem.planning.activations import Activations
from megamem.planning.measured_chunk import PartBytes
from megamem.planning.measured_part import Share
from megamem.planning.ranks import part_parameters, stage_parameters

FLAT = 500_000_000
"""Elements that DeepSpeed copies together to sum gradients under ZeRO 0 (`MEMORY_OPT_ALLREDUCE_SIZE`)."""


@dataclass(frozen=True)
class StepPeak:
    """Bytes of a rank of one stage at the moment that holds most, besides its weights and its optimizer's state."""

    gradients: float
    """Sums of gradients that there are by then."""
    in_flight: float
    """Activations kept for backward passes to come."""
    working: float
    """Bytes of the chunk at work besides; after the last chunk, those of reduction and update."""
    states: float
    """Memory states that the oldest chunk in flight has read; those that later chunks wrote are among what they keep.
    With streams also the states of all micro-batches."""
    borders: float
    """Hidden chunks and gradients that travel between stages."""
    gathered: float
    """Weights of other ranks under ZeRO 3, and the buffer through which gradients leave."""

    @property
    def total(self) -> float:
        """Bytes of all."""
        return self.gradients + self.in_flight + self.working + self.states + self.borders + self.gathered


@dataclass(frozen=True)
class _Moment:
    """Bytes at one moment of a step."""

    gradients: float = 0.0
    in_flight: float = 0.0
    working: float = 0.0
    states: float = 0.0

    @property
    def total(self) -> float:
        """Bytes of all."""
        return self.gradients + self.in_flight + self.working + self.states


@dataclass(frozen=True)
class _Gradients:
    """How a layout keeps gradients, bytes."""

    by_part: Sequence[float]
    """Gradients that one backward pass makes, for each part of the stage, in order."""
    sums: float
    """Sums over the passes of a step, if they are kept elsewhere than where a pass makes them; else 0."""
    sums_persist: bool
    """Whether those sums are there before the first pass too."""
    accumulate_in_place: bool
    """Whether what a pass made is itself the sum; if not, it is freed when the pass is over."""
    whole_window: bool
    """Whether one pass goes through all chunks of a window, and hands gradients over when its first chunk is done."""
    hand_over: float
    """Buffers while gradients are handed over to the sums."""


def step_peak(
    config: RunConfig, activations: Activations, layers: range, stage: int, tp_size: int, dp_size: int
) -> StepPeak:
    """Return the peak of a rank that holds `layers` as `stage` of `config.parallel.pp` stages."""
    parallel, model, rows = config.parallel, config.model, config.training.micro_batch_size
    # the parts of the stage, bottom up, with their bytes by chunk and their parameters that learn
    share = Share.of_run(config, tp_size)
    counts = part_parameters(model, tp_size, learning_of(config))
    parts = [activations.layer(layer, share) for layer in layers]
    sizes = [counts.layers[layer] for layer in layers]
    if layers:  # what they share gets its gradient with the topmost of them first; it counts with the lowest
        sizes[0] += counts.shared_by(layers)
    if stage == 0:
        parts.insert(0, activations.embedding(share))
        sizes.insert(0, counts.embedding)
    if stage == parallel.pp - 1:
        parts.append(activations.head(share))
        sizes.append(counts.head + counts.tied)  # a tied matrix gets its gradient at the head first
        if stage == 0:
            sizes[0] -= counts.tied

    # the hidden chunk that comes in, of one tensor-parallel rank
    element = DTYPES[config.training.precision].itemsize
    split = tp_size if parallel.sequence_parallel else 1
    hidden = model.rows_per_chunk // split * rows * model.hidden_size * element

    # the chunks, played through; after so many micro-batches the schedule repeats itself
    repeats = 2 * parallel.pp if config.interleaved else -(-(parallel.pp + config.bptt_chunks) // config.chunks) + 2
    order = _order(config, stage, min(config.micro_batches(dp_size), repeats))
    specs, dtype = model.component_specs(layers), DTYPES[config.training.precision]
    reads = range(0, config.chunks, config.chunks_per_call)
    states = [sum(component_bytes(model, specs, rows, dtype, tp_size, n).values()) for n in reads]
    gradients = _gradients(config, sizes, dp_size)
    moment = _play(order, parts, hidden if stage else 0, states, config.calls_per_window, gradients)

    # what is there all the time: buffers between stages, gathered weights, states of streams
    neighbors = (stage > 0) + (stage < parallel.pp - 1)
    pending = parallel.pp + 1  # sends under way (`Outbox`)
    borders = float(neighbors * (POSTED + pending) * hidden)
    gathered = buffer = 0.0
    if parallel.zero_stage == 3:
        buffer = 4.0 * min(sum(sizes), BUCKET)
        whole = stage_parameters(model, layers, tp_size)
        gathered = buffer + (float(min(whole, LIVE) * element) if dp_size > 1 else 0.0)
    carried = _carried_states(config, states[-1], dp_size)
    at_work = StepPeak(moment.gradients, moment.in_flight, moment.working, moment.states + carried, borders, gathered)

    # after the last chunk: all gradients, and what reduction and update take
    sums = gradients.sums or sum(gradients.by_part)
    update = StepPeak(sums, 0.0, _update_bytes(config, sum(sizes), dp_size), carried, 0.0, buffer)
    return max(at_work, update, key=lambda peak: peak.total)


def _order(config: RunConfig, stage: int, micro_batches: int) -> Order:
    """Return the stage's actions; without a pipeline whole windows, forward and then backward (`WindowEngine`).

    Where windows are read layer by layer, each is one chunk of the schedule.
    """
    stages, chunks = config.parallel.pp, config.chunks // config.chunks_per_call
    bptt_chunks = config.calls_per_window
    if stages > 1:
        return stage_order(stage, stages, micro_batches, chunks, bptt_chunks, config.interleaved)
    order: Order = []
    for window in window_schedule(micro_batches, chunks, bptt_chunks):
        order += [Action("forward", window.micro_batch, chunk) for chunk in window.chunks]
        order += [Action("backward", window.micro_batch, chunk) for chunk in reversed(window.chunks)]
    return order


def _gradients(config: RunConfig, sizes: Sequence[int], dp_size: int) -> _Gradients:
    """Return how DeepSpeed keeps the gradients of parts with so many parameters that learn."""
    zero, total = config.parallel.zero_stage, sum(sizes)
    element = DTYPES[config.training.precision].itemsize
    full_precision = element == 4
    # in BF16 the next bucket is sent while one is on its way
    bucket = min(total, BUCKET if full_precision else 2 * BUCKET) * 4.0 if zero == 2 else 0.0
    divided = -(-total // dp_size)
    return _Gradients(
        by_part=[float(size * element) for size in sizes],
        # FP32 without ZeRO 2 or 3 adds up in the parameters' own gradients; ZeRO 2 and 3 keep a rank's part of the sums
        sums=0.0 if full_precision and zero < 2 else 4.0 * (divided if zero >= 2 else total),
        sums_persist=zero == 3 or (zero == 1 and not full_precision),
        accumulate_in_place=full_precision and zero < 2,
        whole_window=config.parallel.pp == 1,
        hand_over=bucket + element * divided if zero >= 2 else 0.0,
    )


def _update_bytes(config: RunConfig, total: int, dp_size: int) -> float:
    """Return the bytes after the last backward pass besides gradients: a flat copy of them, summed or updated from.

    total: parameters of the rank that learn.
    """
    return min(total, FLAT) * 4.0 if config.parallel.zero_stage == 0 else -(-total // dp_size) * 4.0


def _carried_states(config: RunConfig, states: int, dp_size: int) -> float:
    """Return the bytes of states that go from step to step with streams.

    These are the old and the new ones of all micro-batches, and one more while it is chosen. states: bytes of one
    micro-batch's.
    """
    if config.data.feeding != "streams":
        return 0.0
    return float((2 * config.accumulation_steps(dp_size) + 1) * states)


def _play(
    order: Order,
    parts: Sequence[Sequence[PartBytes]],
    entered: float,
    states_read: Sequence[int],
    bptt_chunks: int,
    gradients: _Gradients,
) -> _Moment:
    """Play the actions of a stage and return the moment that holds most.

    Args:
        parts: bytes of the stage's parts, bottom up, and of each by chunk.
        entered: bytes of the hidden chunk that comes in.
        states_read: bytes of the states that each chunk reads.
    """
    # kept: activations in flight; new_gradients: what the pass under way has made; sums: what earlier passes added up
    kept, new_gradients, most = 0.0, 0.0, _Moment()
    sums = gradients.sums if gradients.sums_persist else 0.0
    # by micro-batch: gradients of states on their way to the chunk before; chunks whose backward is still to come
    state_gradients: dict[int, float] = {}
    pending: dict[int, list[int]] = {}
    for action in order:
        chunk_parts = [part[action.chunk] for part in parts]
        chunks = pending.setdefault(action.micro_batch, [])
        if action.kind == "forward":
            chunks.append(action.chunk)
        # the states that the oldest pending chunk of each micro-batch reads; later ones are in what chunks keep
        states = float(sum(states_read[min(left)] for left in pending.values() if left))

        if action.kind == "forward":
            working = _forward_bytes(chunk_parts) + entered
            most = _larger(most, _Moment(sums + new_gradients, kept, working, states))
            kept += entered + sum(part.kept for part in chunk_parts)
            continue

        begins_pass = not gradients.whole_window or (action.chunk + 1) % bptt_chunks == 0
        ends_pass = not gradients.whole_window or action.chunk % bptt_chunks == 0
        # a pass over one chunk adds to the sums of another in place, but those of a whole window lie beside them
        beside_sums = not gradients.accumulate_in_place or (gradients.whole_window and bptt_chunks > 1)
        made = gradients.by_part if begins_pass and (beside_sums or not sums) else None
        most = _larger(most, _Moment(sums + new_gradients, kept, _backward_bytes(chunk_parts, made), states))
        new_gradients += sum(made or [])

        # the chunk is through: its activations go, and the gradients of states that it was handed
        chunks.remove(action.chunk)
        kept -= entered + sum(part.kept for part in chunk_parts) + state_gradients.pop(action.micro_batch, 0.0)
        if ends_pass:
            sums, new_gradients = max(sums, new_gradients if gradients.accumulate_in_place else gradients.sums), 0.0
            most = _larger(most, _Moment(sums, kept, gradients.hand_over, states))
        # gradients reach the chunk before through the states, but not over the border of a window
        if action.chunk % bptt_chunks:
            state_gradients[action.micro_batch] = sum(part.state_gradients for part in chunk_parts)
            kept += state_gradients[action.micro_batch]
    return most


def _larger(most: _Moment, moment: _Moment) -> _Moment:
    """Return the moment that holds more, the earlier one of equals."""
    return moment if moment.total > most.total else most


def _forward_bytes(parts: Sequence[PartBytes]) -> float:
    """Return the most bytes while a chunk passes up through the parts, above those that there were before."""
    kept = most = 0.0
    for part in parts:
        most = max(most, kept + part.forward)
        kept += part.kept
    return most


def _backward_bytes(parts: Sequence[PartBytes], gradients: Sequence[float] | None) -> float:
    """Return the most bytes while a chunk's gradient passes down, above those that there were before.

    Parts that it has passed hold nothing of the chunk any more. gradients: bytes of the gradients of each part's
    parameters, if there is no room for them yet.
    """
    held = most = 0.0
    for part, new in zip(reversed(parts), reversed(gradients or [0.0] * len(parts)), strict=True):
        most = max(most, held + part.backward + new)
        held += part.state_gradients - part.kept + new
    return most
