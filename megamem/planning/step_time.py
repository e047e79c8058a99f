"""The time of an optimizer step, predicted from operations, bytes and the schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from megamem.config.parallel import ParallelConfig
from megamem.config.run import RunConfig
from megamem.memory.base import DTYPES
from megamem.pipeline.deepspeed_settings import BUCKET
from megamem.pipeline.freezing import backward_pass_of
from megamem.pipeline.placement import contiguous
from megamem.pipeline.schedule import Action, chunk_schedule
from megamem.pipeline.simulate import Cost, simulate
from megamem.planning.activations import Activations
from megamem.planning.machines import Machine
from megamem.planning.measured_chunk import PartWork
from megamem.planning.measured_part import Share
from megamem.planning.roofline import PassTime, Rates, pass_time
from megamem.planning.traffic import (
    StageParameters,
    Traffic,
    all_reduce,
    gradients_of_a_pass,
    summing_passes,
    sums_again,
    traffic,
)

UPDATE_BYTES = 30
"""Bytes that AdamW reads and writes for a parameter: gradient, FP32 weight and two moments twice, weight."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on the slowest stage's ranks, by what they do or wait for."""

    compute: PassTime
    """Operations of the busiest stage, by what they wait for."""
    tensor: float
    """Sums over its tensor-parallel ranks."""
    bubble: float
    """Waiting for other stages, and for hidden chunks on their way."""
    data: float
    """Waiting for gradients and weights over data-parallel ranks."""
    update: float
    """The optimizer's update."""

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.compute.total + self.tensor + self.bubble + self.data + self.update

    @property
    def bubble_share(self) -> float:
        """The bubble over the busiest stage's working time."""
        return self.bubble / (self.compute.total + self.tensor)

    def to_dict(self) -> dict[str, float]:
        """Return plain data, for JSON: the parts of `compute` beside the others."""
        parts = asdict(self)
        return {**parts.pop("compute"), **parts, "total": self.total}


@dataclass(frozen=True)
class Layout:
    """A run on so many data-parallel ranks, and the layers of each stage."""

    config: RunConfig
    dp_size: int
    counts: tuple[int, ...]
    """Number of layers of each stage."""

    @property
    def sequences(self) -> int:
        """Micro-batches that a data-parallel rank goes through in a step, each as often as it is read."""
        return self.config.micro_batches(self.dp_size)

    def to_dict(self) -> dict[str, object]:
        """Return plain data, for JSON."""
        parallel, training = self.config.parallel, self.config.training
        return {
            "pp": parallel.pp,
            "tp": parallel.tp,
            "dp": self.dp_size,
            "zero_stage": parallel.zero_stage,
            "micro_batch_size": training.micro_batch_size,
            "bptt_chunks": self.config.bptt_chunks,
            "recompute": training.recompute,
            "window_order": training.window_order,
        }


class StageWork:
    """The seconds of the operations of a stage by chunk, from the roofline; each part's are computed once."""

    def __init__(self, activations: Activations, rates: Rates) -> None:
        """Time nothing yet."""
        self.activations, self.rates = activations, rates
        self.rows_per_chunk = activations.model.rows_per_chunk
        # by the identity of what `activations` keeps
        self._timed: dict[int, tuple[PassTime, PassTime]] = {}
        self._stages: dict[tuple[object, ...], list[tuple[PassTime, PassTime]]] = {}
        """By number of layers of each kind, whether first or last, and share."""

    def stages(self, layout: Layout) -> list[list[tuple[PassTime, PassTime]]]:
        """Return by stage and chunk the times of the forward and the backward pass of a micro-batch."""
        share = Share.of_run(layout.config, layout.config.parallel.tp)
        return [self.stage(layers, share) for layers in contiguous(layout.counts)]

    def stage(self, layers: range, share: Share) -> list[tuple[PassTime, PassTime]]:
        """Return by chunk the times of the forward and the backward pass of a stage with these layers."""
        # most stages of most layouts are made of as many layers of the same kinds
        kinds = Counter(self.activations.kinds[layers.start : layers.stop])
        key = frozenset(kinds.items()), layers.start == 0, layers.stop == self.activations.model.layers, share
        if key not in self._stages:
            self._stages[key] = self._sum(layers, share)
        return self._stages[key]

    def _sum(self, layers: range, share: Share) -> list[tuple[PassTime, PassTime]]:
        """Return the sums over a stage's parts; see `stage`."""
        parts = [self.activations.layer_work(layer, share) for layer in layers]
        if layers.start == 0:
            parts.append(self.activations.embedding_work(share))
        if layers.stop == self.activations.model.layers:
            parts.append(self.activations.head_work(share))
        # layers of one kind have one list
        alike = {id(part): part for part in parts}
        counts = Counter(map(id, parts))
        return [
            _one_after_the_other((self._times(work), counts[part]) for part, work in zip(alike, of_chunk, strict=True))
            for of_chunk in zip(*alike.values(), strict=True)
        ]

    def _times(self, work: PartWork) -> tuple[PassTime, PassTime]:
        """Return the times of both passes of a part."""
        if id(work) not in self._timed:
            self._timed[id(work)] = pass_time(work.forward, self.rates), pass_time(work.backward, self.rates)
        return self._timed[id(work)]


def _one_after_the_other(parts: Iterable[tuple[tuple[PassTime, PassTime], int]]) -> tuple[PassTime, PassTime]:
    """Return the times of the forward and the backward pass through all parts, each so many times."""
    forward, backward = zip(*((times[0] * count, times[1] * count) for times, count in parts), strict=True)
    return sum_of(forward), sum_of(backward)


def sum_of(times: Iterable[PassTime]) -> PassTime:
    """Return the time of passes one after the other."""
    return sum(times, PassTime())


def step_time(
    layout: Layout,
    parameters: Sequence[StageParameters],
    machine: Machine,
    work: StageWork,
    simulated: bool = True,
) -> StepTime:
    """Return the time of a step.

    Args:
        parameters: those of a rank of each stage.
        work: times of the model's operations on such a machine.
        simulated: play the schedule; if not, the bubble is that of even chunks, (P - 1) / (M C) of the working time.
    """
    config, reach = layout.config, backward_pass_of(layout.config)
    training, parallel, stages = config.training, config.parallel, len(layout.counts)
    element = DTYPES[training.precision].itemsize
    # layers read, and stages hand on, rows beside the tokens too; and all chunks of a window where it is read by layer
    rows = work.rows_per_chunk * config.chunks_per_call * training.micro_batch_size
    hidden, calls = float(rows * config.model.hidden_size * element), config.chunks // config.chunks_per_call
    # two sums over tensor-parallel ranks, as each layer makes in each direction
    summed = 2 * _sum_seconds(hidden, parallel, machine)
    passes = work.stages(layout)
    # of each stage, the layers that gradients reach: the others send and repeat nothing in the backward pass
    reached = [reach.reached(layers) if reach else len(layers) for layers in contiguous(layout.counts)]
    # each layer has two sums in the backward pass, and those of what is computed again
    repeated = 1 + sums_again(config) / 2

    def sums(stage: int, forward: bool) -> float:
        """Return the pairs of sums of a pass: of its layers, the embedding's forward and the head's backward."""
        if forward:
            return layout.counts[stage] + 0.5 * (stage == 0)
        return repeated * reached[stage] + 0.5 * (stage == stages - 1)

    def cost(stage: int, action: Action) -> float:
        """Return the seconds of an action on a stage: operations and sums."""
        forward = action.kind == "forward"
        return passes[stage][action.chunk][0 if forward else 1].total + sums(stage, forward) * summed

    # working time of each stage; the slowest sets the pace
    busy = [_sequence_seconds(stage, calls, cost) * layout.sequences for stage in range(stages)]
    slowest = busy.index(max(busy))
    transfer = hidden / (parallel.tp if parallel.sequence_parallel else 1)
    transfer = machine.latency + transfer / machine.hop(stages, parallel.tp * layout.dp_size)
    # the bubble is what the schedule takes longer than the slowest stage works
    if stages == 1:
        makespan = busy[0]
    elif simulated:
        makespan = _makespan(layout, cost, transfer)
    else:
        makespan = busy[slowest] * (1 + (stages - 1) / (layout.sequences * config.chunks))
    rate = machine.rate(layout.dp_size, parallel.tp)
    stages_passes = zip(stage_traffic(layout, parameters, work.rows_per_chunk), parameters, passes, strict=True)
    shard = max(part.learning for part in parameters) / (layout.dp_size if parallel.zero_stage else 1)
    return StepTime(
        compute=sum_of(time for chunk in passes[slowest] for time in chunk) * layout.sequences,
        tensor=layout.sequences * calls * (sums(slowest, True) + sums(slowest, False)) * summed,
        bubble=makespan - busy[slowest],
        data=max(
            sent.weights / rate + waiting_for_gradients(layout, own, rate, [backward.total for _, backward in chunks])
            for sent, own, chunks in stages_passes
        ),
        update=UPDATE_BYTES * shard / machine.reached.memory,
    )


def _sum_seconds(size: float, parallel: ParallelConfig, machine: Machine) -> float:
    """Return the seconds of a sum of so many bytes over tensor-parallel ranks; of a split sequence it is two calls."""
    if parallel.tp == 1:
        return 0.0
    calls = 2 if parallel.sequence_parallel else 1
    return calls * machine.latency + all_reduce(size, parallel.tp) / machine.rate(parallel.tp)


def waiting_for_gradients(layout: Layout, parameters: StageParameters, rate: float, backward: Sequence[float]) -> float:
    """Return the seconds of a step for which a rank of a stage waits until gradients are summed over its data-parallel
    ranks.

    Under ZeRO 1 and 2 in BF16 buckets leave while a backward pass runs (`megamem.pipeline.gradient_sums`). A weight's
    gradient is complete when the pass has come down to it in the first chunk of its window: what is sent has the time
    of that chunk's backward for itself, and the last bucket leaves when the pass is over.

    Args:
        parameters: those of a rank of the stage.
        rate: bytes per second that a rank sends around its ring.
        backward: seconds of the backward of each chunk of a micro-batch on the stage, or of each window as it is read.
    """
    config = layout.config
    seconds = gradients_of_a_pass(config, parameters, layout.dp_size) / rate
    passes = summing_passes(config, layout.dp_size)
    if config.training.precision == "fp32" or config.parallel.zero_stage in (0, 3):
        return passes * seconds
    last = seconds * min(1.0, BUCKET / max(1, parameters.learning))
    # the first chunks of the windows whose passes sum: of each window, or of the last one
    window = config.calls_per_window
    firsts = backward[::window] if config.parallel.zero_stage == 2 else backward[-window:][:1]
    waits = [last + max(0.0, seconds - last - beside) for beside in firsts]
    return passes * sum(waits) / len(waits)


def stage_traffic(layout: Layout, parameters: Sequence[StageParameters], rows_per_chunk: int) -> list[Traffic]:
    """Return the traffic of a rank of each stage; see `traffic`. parameters: of a rank of each stage."""
    config, dp_size = layout.config, layout.dp_size
    stages = enumerate(zip(contiguous(layout.counts), parameters, strict=True))
    return [traffic(config, layers, stage, count, dp_size, rows_per_chunk) for stage, (layers, count) in stages]


def _sequence_seconds(stage: int, chunks: int, cost: Cost) -> float:
    """Return the seconds that a stage works on one sequence."""
    return sum(cost(stage, Action(kind, 0, chunk)) for chunk in range(chunks) for kind in ("forward", "backward"))


def _makespan(layout: Layout, cost: Cost, transfer: float) -> float:
    """Return the seconds of the whole schedule.

    A long one is played until the pipeline is full; after that all micro-batches take as long.
    """
    config, stages = layout.config, len(layout.counts)

    def played(sequences: int) -> float:
        """Return the seconds of a schedule of so many sequences."""
        orders = chunk_schedule(stages, sequences, config.chunks, config.bptt_chunks, config.interleaved)
        return simulate(orders, config.bptt_chunks, cost, transfer, config.interleaved).makespan

    # interleaved micro-batches come in groups of as many as there are stages
    more = stages if config.interleaved else 2
    filled = 2 * stages if config.interleaved else -(-(stages + config.bptt_chunks) // config.chunks) + 4
    if layout.sequences <= filled + more:
        return played(layout.sequences)
    first, second = played(filled), played(filled + more)
    return second + (layout.sequences - filled - more) * (second - first) / more
