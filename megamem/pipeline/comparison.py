"""What a pipeline's schedule costs: chunk by chunk as here, and over whole sequences (1F1B) for comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megamem.config.run import RunConfig
from megamem.pipeline.balancing import chunk_flops, place
from megamem.pipeline.freezing import backward_pass_of
from megamem.pipeline.schedule import Action, chunk_schedule
from megamem.pipeline.simulate import Cost, Timeline, even_cost, simulate


@dataclass(frozen=True)
class ScheduleReport:
    """Both schedules of one step, simulated with the same costs."""

    stages: int
    micro_batches: int
    """Micro-batches that a data-parallel rank goes through in a step, each as often as it is read."""
    chunks: int
    bptt_chunks: int
    ours: Timeline
    one_f_one_b: Timeline
    """Its units are whole sequences."""

    def peaks(self) -> list[int]:
        """Return, for each stage, the most chunks held at once."""
        return [self.ours.peak_units(stage) for stage in range(self.stages)]

    def one_f_one_b_peaks(self) -> list[int]:
        """Return the same for 1F1B, in chunks: each of its units holds all chunks of a sequence."""
        return [self.chunks * self.one_f_one_b.peak_units(stage) for stage in range(self.stages)]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return {
            "stages": self.stages,
            "micro_batches": self.micro_batches,
            "chunks": self.chunks,
            "bptt_chunks": self.bptt_chunks,
            "bubble": self.ours.bubble,
            "makespan": self.ours.makespan,
            "peak_units": self.peaks(),
            "1f1b": {
                "bubble": self.one_f_one_b.bubble,
                "makespan": self.one_f_one_b.makespan,
                "peak_units": self.one_f_one_b_peaks(),
            },
        }


def compare(
    stages: int,
    micro_batches: int,
    chunks: int,
    bptt_chunks: int,
    cost: Cost | None = None,
    interleaved: bool = False,
) -> ScheduleReport:
    """Simulate both schedules.

    Args:
        cost: time of an action on a stage; 1 forward and 2 backward per chunk if not given.
        interleaved: whether a memory goes from the last stage to the first, and micro-batches take turns.
    Raises: ValueError unless bptt_chunks divides chunks.
    """
    cost = cost or even_cost()

    def sequence_cost(stage: int, action: Action) -> float:
        return sum(cost(stage, Action(action.kind, action.micro_batch, chunk)) for chunk in range(chunks))

    return ScheduleReport(
        stages,
        micro_batches,
        chunks,
        bptt_chunks,
        simulate(
            chunk_schedule(stages, micro_batches, chunks, bptt_chunks, interleaved),
            bptt_chunks,
            cost,
            last_to_first=interleaved,
        ),
        simulate(chunk_schedule(stages, micro_batches, 1, 1), 1, sequence_cost),
    )


def compare_for(config: RunConfig, dp_size: int = 1) -> ScheduleReport:
    """Both schedules of a run's step, with the operations of its layers as they are placed."""
    counts = place(config)
    return compare(
        len(counts),
        config.micro_batches(dp_size),
        config.chunks,
        config.bptt_chunks,
        chunk_flops(config.model, config.chunks, counts, backward_pass_of(config)),
        config.interleaved,
    )
