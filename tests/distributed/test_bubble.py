"""The real executor's idle time: four processes whose stages sleep, so that neither cores nor cache matter."""

import time
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megamem.config.load import parse_config
from megamem.config.model import ModelConfig
from megamem.data.batch import Batch
from megamem.memory.base import TensorSpec
from megamem.model.objectives.next_token import NextToken
from megamem.model.stage import ModelMemory
from megamem.parallel.topology import Topology
from megamem.pipeline.balancing import chunk_flops
from megamem.pipeline.channels import Borders
from megamem.pipeline.executor import StageExecutor
from megamem.pipeline.program import training_programs
from megamem.pipeline.schedule import Action, bubble, chunk_schedule, peak_units
from megamem.pipeline.simulate import Cost, Timeline, even_cost, simulate
from megamem.pipeline.train_chunk import MicroBatch, chunk_places
from megamem.pipeline.warm_up import connect
from tests.distributed.harness import run_distributed

pytestmark = [pytest.mark.distributed, pytest.mark.alone]

STAGES, SEQUENCES, CHUNKS = 4, 4, 8
FORWARD_S, BACKWARD_S = 0.08, 0.16
"""Of a chunk: long against the executor's own work on it, some 0.5 ms."""
ATTEMPTS = 3
"""What else the machine does can only add idle time: a measurement that shows too much is taken again, with naps twice
as long, against which the same disturbance is half as large."""

LAMEMO = {
    "layers": 2 * STAGES, "hidden_size": 64, "heads": 4, "vocab_size": 64, "chunk_size": 16,
    "mixer": {"kind": "lamemo"},
}  # fmt: skip
"""Two layers on each stage. All but the topmost one compute memory rows besides tokens, as many as there are tokens."""


def lamemo_cost() -> Cost:
    """Seconds in the ratio of the operations that LaMemo's stages compute, `FORWARD_S` for most of its forwards."""
    flops = chunk_flops(parse_config(ModelConfig, LAMEMO, "test"), CHUNKS, [2] * STAGES)
    second = FORWARD_S / flops(1, Action("forward", 0, CHUNKS - 1))
    return lambda stage, action: second * flops(stage, action)


COSTS = {"even": even_cost(FORWARD_S, BACKWARD_S), "lamemo": lamemo_cost()}


class Run(NamedTuple):
    """One step that is timed."""

    chunks: int = CHUNKS
    bptt_chunks: int = CHUNKS
    duration: float = 1
    """Factor of the costs."""
    spanning: bool = False
    cost: str = "even"

    def bubble(self) -> float:
        """The simulated bubble."""
        orders = chunk_schedule(STAGES, SEQUENCES, self.chunks, self.bptt_chunks, self.spanning)
        return simulate(orders, self.bptt_chunks, COSTS[self.cost], last_to_first=self.spanning).bubble


# 1F1B's units are whole sequences; a quarter of the time is long enough for its large bubble
RUNS = {
    "bptt1": Run(bptt_chunks=1),
    "bptt8": Run(),
    "1f1b": Run(1, 1, duration=CHUNKS / 4),
    "spanning": Run(spanning=True),
    "lamemo-bptt1": Run(bptt_chunks=1, cost="lamemo"),
    "lamemo-bptt8": Run(cost="lamemo"),
}


class Nap(torch.autograd.Function):
    """Identity that takes its time in both directions."""

    @staticmethod
    def forward(context, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        context.seconds = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(context, gradient: Tensor):
        time.sleep(context.seconds)
        return gradient, None, None


class SleepingStage(nn.Module):
    """Behaves like a `Stage` without layers, which takes the time that `cost` says.

    spanning: a memory leaves the last stage and enters the first one, which waits for it and adds nothing of it.
    """

    auxiliary_losses = ()

    def __init__(self, topology: Topology, cost: Cost, spanning: bool) -> None:
        super().__init__()
        self.first, self.last = topology.first_stage, topology.last_stage
        self.weight = nn.Parameter(torch.ones(()))
        self.stage, self.cost = topology.pp_rank, cost
        declared = {"memory": TensorSpec((1, "batch", "hidden"))}
        self.model_memories = {"memory": ModelMemory(declared, {"hidden": 1})} if spanning else {}

    def read_documents(self, x, states, chunk):
        hidden = x[..., None] * self.weight if self.first else x
        if self.first and states:
            hidden = hidden + 0.0 * states["memory"]["memory"]
        seconds = (self.cost(self.stage, Action(kind, 0, chunk.starts[0])) for kind in ("forward", "backward"))
        hidden = Nap.apply(hidden, *seconds)
        if self.last and self.model_memories:
            states = {"memory": {"memory": 0.0 * hidden[-1:]}}
        return hidden, states, {}

    def token_losses(self, hidden, labels):
        return hidden.sum(-1)

    def check_states(self, states, rows):
        pass


def timed_run(topology, run, longer):
    """One step of SEQUENCES sequences, with naps `longer` times as long: events, peak, result."""
    chunks, bptt_chunks, duration, spanning, cost = run
    stage = SleepingStage(topology, lambda *what: longer * duration * COSTS[cost](*what), spanning)
    executor = StageExecutor(stage, NextToken(None), topology.pp_rank, 1, bptt_chunks)
    executor.events = []
    starts = np.arange(chunks)[:, None]
    batches = [Batch(torch.ones(chunks, 1), torch.zeros(chunks, 1), starts, (0,)) for _ in range(SEQUENCES)]
    program = training_programs(STAGES, SEQUENCES, chunks, bptt_chunks, spanning)[topology.pp_rank]
    shapes = [(1, 1, 1)] * SEQUENCES * chunks
    borders = Borders(topology, program, shapes, shapes, torch.float32, executor.memory_shapes(1, torch.float32))
    fresh = {"memory": {"memory": torch.zeros(1, 1, 1)}} if spanning and stage.first else {}
    torch.distributed.barrier()
    micro_batches = [MicroBatch(batch, chunk_places(batch)) for batch in batches]
    executor.run(micro_batches, lambda micro_batch: fresh, torch.ones(()), borders, keep_states=False)
    timeline = Timeline(STAGES, tuple(executor.events))
    return {
        "events": timeline.to_dict(),
        "bubble": bubble_of(timeline),
        "peak": executor.peak_units,
        "gradient": float(stage.weight.grad or 0),
    }


def world(payload):
    topology = Topology.start(pp=STAGES, device="cpu")
    connect(topology)
    results = {}
    for name in payload:
        run = RUNS[name]
        for attempt in range(ATTEMPTS):
            found = timed_run(topology, run, 2**attempt)
            if name not in results or found["bubble"] < results[name]["bubble"]:
                results[name] = found
            if found["bubble"] < 1.08 * run.bubble():
                break
    return results


def bubble_of(timeline):
    """`Timeline.bubble` from each rank's own events, the same on all."""
    last, first = max(e.end for e in timeline.events), min(e.start for e in timeline.events)
    ends = torch.tensor([last, -first], dtype=torch.float64)
    busy = torch.tensor(timeline.busy(timeline.events[0].stage), dtype=torch.float64)
    torch.distributed.all_reduce(ends, torch.distributed.ReduceOp.MAX)
    torch.distributed.all_reduce(busy)
    return (STAGES * ends.sum() / busy - 1).item()


@pytest.fixture(scope="module")
def measured():
    ranks = run_distributed(STAGES, "tests.distributed.test_bubble:world", list(RUNS))
    results = {}
    for name in RUNS:
        results[name] = joined([rank[name] for rank in ranks])
        print(f"{name}: bubble {results[name].timeline.bubble:.4f}, peaks {results[name].peaks}")
    return results


def joined(ranks):
    events = [event for rank in ranks for event in Timeline.from_dict(rank["events"]).events]
    return SimpleNamespace(
        timeline=Timeline(STAGES, tuple(events)),
        peaks=[rank["peak"] for rank in ranks],
        gradient=ranks[0]["gradient"],
    )


@pytest.mark.parametrize("bptt_chunks", [1, CHUNKS])
def test_the_measured_bubble_is_the_simulated_one(measured, bptt_chunks):
    expected = RUNS[f"bptt{bptt_chunks}"].bubble()
    assert expected == pytest.approx(bubble(STAGES, SEQUENCES, CHUNKS))
    found = measured[f"bptt{bptt_chunks}"].timeline.bubble
    assert found == pytest.approx(expected, rel=0.1)
    assert found < measured["1f1b"].timeline.bubble / 4


def test_a_memory_from_the_last_stage_to_the_first_costs_no_more(measured):
    """Micro-batches take turns: as many as stages keep all stages busy."""
    expected = RUNS["spanning"].bubble()
    assert expected == pytest.approx(bubble(STAGES, SEQUENCES, CHUNKS))
    assert measured["spanning"].timeline.bubble == pytest.approx(expected, rel=0.1)
    formula = [peak_units(stage, STAGES, SEQUENCES, CHUNKS, CHUNKS, interleaved=True) for stage in range(STAGES)]
    assert measured["spanning"].peaks == formula


@pytest.mark.parametrize("bptt_chunks", [1, CHUNKS])
def test_memory_rows_cost_the_time_that_was_simulated(measured, bptt_chunks):
    """The topmost layer makes no rows, so its stage waits: a bubble nearly half as large again as without rows."""
    expected = RUNS[f"lamemo-bptt{bptt_chunks}"].bubble()
    assert expected > 1.4 * bubble(STAGES, SEQUENCES, CHUNKS)
    assert measured[f"lamemo-bptt{bptt_chunks}"].timeline.bubble == pytest.approx(expected, rel=0.1)


def test_1f1b_measured_the_same_way(measured):
    assert measured["1f1b"].timeline.bubble == pytest.approx(bubble(STAGES, SEQUENCES, 1), rel=0.1)


@pytest.mark.parametrize("bptt_chunks", [1, CHUNKS])
def test_measured_peaks_are_those_of_the_formula(measured, bptt_chunks):
    result = measured[f"bptt{bptt_chunks}"]
    formula = [peak_units(stage, STAGES, SEQUENCES, CHUNKS, bptt_chunks) for stage in range(STAGES)]
    assert result.peaks == formula == [result.timeline.peak_units(stage) for stage in range(STAGES)]


def test_nothing_was_skipped(measured):
    for name, result in measured.items():
        units = SEQUENCES * (1 if name == "1f1b" else CHUNKS)
        assert result.gradient == units
        assert len(result.timeline.events) == 2 * STAGES * units
