"""What a run will cost on given devices: arithmetic, bytes of each rank, time of a step, days, checkpoints."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from megamem.config.run import RunConfig
from megamem.costs.flops import flops_per_token
from megamem.costs.parameters import parameter_counts
from megamem.costs.state_bytes import split_state_bytes
from megamem.errors import LayoutError
from megamem.memory.base import DTYPES
from megamem.pipeline.balancing import place
from megamem.pipeline.placement import contiguous
from megamem.planning.activations import Activations
from megamem.planning.machines import DISK, Machine
from megamem.planning.peak import StepPeak, step_peak
from megamem.planning.ranks import RankBytes, held_bytes, stage_parameters
from megamem.planning.step_time import EFFICIENCY, Layout, StepTime, stage_traffic, step_time
from megamem.planning.traffic import Traffic

SAVED = 12
"""Bytes of a parameter in a checkpoint: FP32 weight and two moments."""


@dataclass(frozen=True)
class RankPlan:
    """A rank of a stage at the moment of a step when it holds most, bytes."""

    stage: int
    layers: range
    held: RankBytes
    peak: StepPeak

    @property
    def total(self) -> float:
        """Bytes that must fit: the most within a step, or while the rank is built, whole and in FP32 at first."""
        return max(self.held.weights + self.held.optimizer + self.peak.total, self.building)

    @property
    def building(self) -> float:
        """Bytes while DeepSpeed divides what the rank has built."""
        return 4.0 * self.held.parameters + self.held.weights

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        peak = {name: round(value) for name, value in asdict(self.peak).items()}
        return {
            "stage": self.stage,
            "layers": [self.layers.start, self.layers.stop],
            "parameters": self.held.parameters,
            "weights": self.held.weights,
            "optimizer": self.held.optimizer,
            **peak,
            "building": round(self.building),
            "total": round(self.total),
        }


@dataclass(frozen=True)
class Plan:
    """Of a run on so many devices."""

    layout: Layout
    machine: Machine
    efficiency: float
    ranks: list[RankPlan]
    other_way: list[RankPlan]
    """Of the same run without activation checkpointing if it is with, and with if it is without."""
    traffic: list[Traffic]
    time: StepTime
    states: dict[str, int]
    """Bytes of a micro-batch's memory states at the end of a sequence, all layers of a tensor-parallel rank: of
    `fixed` size, and in `banks` that grow."""

    @property
    def config(self) -> RunConfig:
        """The run."""
        return self.layout.config

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks."""
        return self.layout.dp_size

    @property
    def devices(self) -> int:
        """How many."""
        return self.dp_size * self.config.parallel.tp * self.config.parallel.pp

    @property
    def total(self) -> float:
        """Bytes of the fullest rank."""
        return max(rank.total for rank in self.ranks)

    @property
    def fits(self) -> bool:
        """Whether the fullest rank fits into a device, less what is kept in reserve."""
        return self.total <= self.machine.usable

    @property
    def flops(self) -> dict[str, float]:
        """Per token; see `flops_per_token`."""
        return flops_per_token(self.config.model, self.config.data.sequence_length)

    @property
    def tokens_per_second(self) -> float:
        """Of the whole job."""
        return self.config.training.batch_tokens / self.time.total

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization that follows."""
        peak = self.machine.peak(self.config.training.precision) * self.devices
        return self.flops["training"] * self.tokens_per_second / peak

    @property
    def days(self) -> float:
        """Of all steps, without pauses."""
        return self.config.steps * self.time.total / 86_400

    @property
    def checkpoint(self) -> dict[str, float]:
        """Bytes of one and seconds to write it, every node its share; with states where they are carried over."""
        size = float(SAVED * parameter_counts(self.config.model)["total"])
        if self.config.data.feeding == "streams":
            rows = self.config.accumulation_steps(self.dp_size) * self.dp_size * self.config.parallel.tp
            size += rows * sum(self.states.values())
        nodes = -(-self.devices // self.machine.per_node)
        return {"bytes": size, "seconds": size / nodes / DISK}

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        other_way = "no_recompute" if self.config.training.recompute else "recompute"
        return {
            "name": self.config.name,
            "devices": self.devices,
            "device": self.machine.name,
            "layout": self.layout.as_dict(),
            "parameters": parameter_counts(self.config.model),
            "flops_per_token": self.flops,
            "ranks": [rank.as_dict() for rank in self.ranks],
            other_way: [rank.as_dict() for rank in self.other_way],
            "states": self.states,
            "fits": self.fits,
            "traffic": [asdict(sent) for sent in self.traffic],
            "bubble": self.time.bubble_share,
            "step_seconds": self.time.as_dict(),
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "days": self.days,
            "checkpoint": self.checkpoint,
            "efficiency": self.efficiency,
        }


def data_parallel(config: RunConfig, devices: int | None) -> int:
    """Data-parallel size of the run on so many devices; as configured if not given.

    Raises: LayoutError if devices or batch cannot be divided so.
    """
    parallel = config.parallel
    part = parallel.tp * parallel.pp
    devices = devices or part * (parallel.dp or 1)
    if devices % part or (parallel.dp and devices != part * parallel.dp):
        wanted = f"DP {parallel.dp} needs {part * parallel.dp}" if parallel.dp else f"give a multiple of {part}"
        raise LayoutError(
            f"plan: --devices {devices} does not go with TP {parallel.tp} x PP {parallel.pp}; {wanted} devices"
        )
    try:
        config.accumulation_steps(devices // part)
    except ValueError as error:
        raise LayoutError(str(error)) from None
    return devices // part


def make_plan(
    config: RunConfig,
    dp_size: int,
    machine: Machine,
    efficiency: float = EFFICIENCY,
    found: Activations | None = None,
) -> Plan:
    """Plan a run.

    found: measurements of this model's activations at this precision, where there are some already.
    Raises: LayoutError for a layout that the model cannot be split into.
    """
    found = found or Activations(config.model, config.training.precision, config.chunks)
    counts = place(config)
    layout = Layout(config, dp_size, tuple(counts))
    ranks = rank_plans(layout, found)
    switched = config.training.model_copy(update={"recompute": not config.training.recompute})
    other_way = Layout(config.model_copy(update={"training": switched}), dp_size, layout.counts)
    parameters = [rank.held.parameters for rank in ranks]
    sizes = (config.training.micro_batch_size, DTYPES[config.training.precision], config.parallel.tp, config.chunks)
    return Plan(
        layout,
        machine,
        efficiency,
        ranks,
        rank_plans(other_way, found),
        stage_traffic(layout, parameters),
        step_time(layout, parameters, machine, efficiency),
        split_state_bytes(config.model, *sizes),
    )


def rank_plans(layout: Layout, found: Activations) -> list[RankPlan]:
    """A rank of each stage. Raises LayoutError for a layout that the model cannot be split into."""
    config, tp_size, dp_size = layout.config, layout.config.parallel.tp, layout.dp_size
    plans = []
    for stage, layers in enumerate(contiguous(layout.counts)):
        held = held_bytes(config, layers, stage_parameters(config.model, layers, tp_size), tp_size, dp_size)
        plans.append(RankPlan(stage, layers, held, step_peak(config, found, layers, stage, tp_size, dp_size)))
    return plans
