"""The time of an optimizer step, predicted from operations, bytes and the schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from megamem.config.run import RunConfig
from megamem.costs.backward import BackwardPass
from megamem.costs.flops import layer_chunk_flops
from megamem.memory.base import DTYPES
from megamem.pipeline.balancing import chunk_flops
from megamem.pipeline.freezing import backward_pass_of
from megamem.pipeline.placement import contiguous
from megamem.pipeline.schedule import Action, chunk_schedule
from megamem.pipeline.simulate import Cost, simulate
from megamem.planning.machines import ACHIEVED, Machine
from megamem.planning.traffic import StageParameters, Traffic, all_reduce, traffic

EFFICIENCY = 0.4
"""Share of a device's peak that a rank reaches while it works on matrix products and what lies between them."""
UPDATE_BYTES = 30
"""Bytes that AdamW reads and writes for a parameter: gradient, FP32 weight and two moments twice, weight."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on the slowest stage's ranks; the parts do not overlap."""

    compute: float
    """Operations of the busiest stage, at the stated efficiency."""
    tensor: float
    """Sums over its tensor-parallel ranks."""
    bubble: float
    """Waiting for other stages, and for hidden chunks on their way."""
    data: float
    """Gradients and weights over data-parallel ranks."""
    update: float
    """The optimizer's update."""

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.compute + self.tensor + self.bubble + self.data + self.update

    @property
    def bubble_share(self) -> float:
        """The bubble over the busiest stage's working time."""
        return self.bubble / (self.compute + self.tensor)

    def to_dict(self) -> dict[str, float]:
        """Return plain data, for JSON."""
        return {**asdict(self), "total": self.total}


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
        }


def step_time(
    layout: Layout,
    parameters: Sequence[StageParameters],
    machine: Machine,
    efficiency: float = EFFICIENCY,
    flops: Cost | None = None,
    simulated: bool = True,
) -> StepTime:
    """Return the time of a step.

    Args:
        parameters: those of a rank of each stage.
        efficiency: share of the device's peak that ranks reach.
        flops: `chunk_flops` of the model so placed, if it is known already.
        simulated: play the schedule; if not, the bubble is that of even chunks, (P - 1) / (M C) of the working time.
    """
    config, reach = layout.config, backward_pass_of(layout.config)
    training, parallel, stages = config.training, config.parallel, len(layout.counts)
    flops = flops or chunk_flops(config.model, config.chunks, list(layout.counts), reach)
    element = DTYPES[training.precision].itemsize
    tokens = config.model.chunk_size * training.micro_batch_size
    seconds_per_flop = tokens / parallel.tp / (efficiency * machine.peak(training.precision))
    # layers read, and stages hand on, rows beside the tokens too
    hidden = float(config.model.rows_per_chunk * training.micro_batch_size * config.model.hidden_size * element)
    # each layer sums over tensor-parallel ranks twice in each direction
    summed = 2 * all_reduce(hidden, parallel.tp) / machine.rate(parallel.tp)

    # of each stage, the layers that gradients reach: the others send and repeat nothing in the backward pass
    stage_layers = contiguous(layout.counts)
    reached = [reach.reached(layers) if reach else len(layers) for layers in stage_layers]
    unrepeated = [_unreached_flops(config, layers, reach) for layers in stage_layers]

    def cost(stage: int, action: Action) -> float:
        """Return the seconds of an action on a stage: operations and sums."""
        forward = Action("forward", action.micro_batch, action.chunk)
        work, sums = flops(stage, action), 1.0
        if action.kind == "backward" and training.recompute:
            # a block is repeated up to the last tensor that its backward needs: not through its last sum
            work, sums = work + flops(stage, forward) - unrepeated[stage][action.chunk], 1.5
        layers = layout.counts[stage] if action.kind == "forward" else reached[stage]
        return work * seconds_per_flop + sums * layers * summed

    # working time of each stage; the slowest sets the pace
    busy = [_sequence_seconds(stage, config.chunks, cost) * layout.sequences for stage in range(stages)]
    slowest = busy.index(max(busy))
    transfer = hidden / (parallel.tp if parallel.sequence_parallel else 1)
    transfer /= machine.hop(stages, parallel.tp * layout.dp_size)
    # the bubble is what the schedule takes longer than the slowest stage works
    if stages == 1:
        makespan = busy[0]
    elif simulated:
        makespan = _makespan(layout, cost, transfer)
    else:
        makespan = busy[slowest] * (1 + (stages - 1) / (layout.sequences * config.chunks))
    # of the working time, the sums over tensor-parallel ranks (recomputation repeats half of the forward's)
    sent = stage_traffic(layout, parameters)
    passes = layout.counts[slowest] + (1.5 if training.recompute else 1) * reached[slowest]
    sums = layout.sequences * config.chunks * passes * summed
    shard = max(part.learning for part in parameters) / (layout.dp_size if parallel.zero_stage else 1)
    return StepTime(
        compute=busy[slowest] - sums,
        tensor=sums,
        bubble=makespan - busy[slowest],
        data=max(part.data for part in sent) / machine.rate(layout.dp_size, parallel.tp),
        update=UPDATE_BYTES * shard / (ACHIEVED * machine.memory_rate),
    )


def _unreached_flops(config: RunConfig, layers: range, reach: BackwardPass | None) -> list[float]:
    """Return by chunk the forward FLOPs per token of those layers of a stage that gradients do not reach."""
    sums = [0.0] * config.chunks
    for layer in layers if reach else ():
        if reach and not reach.reaches(layer):
            for chunk, flops in enumerate(layer_chunk_flops(config.model, layer, config.chunks)):
                sums[chunk] += flops.forward
    return sums


def stage_traffic(layout: Layout, parameters: Sequence[StageParameters]) -> list[Traffic]:
    """Return the traffic of a rank of each stage. parameters: of a rank of each stage."""
    stages = enumerate(zip(contiguous(layout.counts), parameters, strict=True))
    return [traffic(layout.config, layers, stage, count, layout.dp_size) for stage, (layers, count) in stages]


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
