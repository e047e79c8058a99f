"""The plan of a run on given devices: bytes of each rank, traffic, time of a step, days, checkpoints."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from megamem.config.run import RunConfig
from megamem.costs.flops import flops_per_token
from megamem.costs.parameters import parameter_counts
from megamem.costs.state_bytes import HostMemory, host_memory, split_state_bytes
from megamem.errors import LayoutError
from megamem.memory.base import DTYPES
from megamem.pipeline.balancing import place
from megamem.pipeline.freezing import backward_pass_of, learning_of
from megamem.pipeline.placement import contiguous
from megamem.planning.activations import Activations
from megamem.planning.machines import DISK, Machine
from megamem.planning.peak import StepPeak, step_peak
from megamem.planning.ranks import RankBytes, held_bytes
from megamem.planning.step_time import Layout, StageWork, StepTime, stage_traffic, step_time
from megamem.planning.traffic import StageParameters, Traffic


@dataclass(frozen=True)
class RankReport:
    """The bytes of a rank of one stage at the moment of a step that holds most."""

    stage: int
    layers: range
    held: RankBytes
    """Bytes that it holds all the time."""
    peak: StepPeak
    """Bytes besides at the moment that holds most."""

    @property
    def total(self) -> float:
        """Bytes that must fit: the most within a step or while the rank is built."""
        return max(self.held.weights + self.held.optimizer + self.peak.total, self.building)

    @property
    def building(self) -> float:
        """Bytes while DeepSpeed divides the model, which the rank has built whole and in FP32."""
        return 4.0 * self.held.parameters + self.held.weights

    def to_dict(self) -> dict[str, object]:
        """Return plain data, for JSON."""
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
class PlanReport:
    """The plan of a run on so many devices."""

    layout: Layout
    machine: Machine
    ranks: list[RankReport]
    """A rank of each stage."""
    switched_ranks: list[RankReport]
    """The same ranks with recomputation if the run has none, and without if it has."""
    traffic: list[Traffic]
    """Traffic of a rank of each stage."""
    time: StepTime
    states: dict[str, int]
    """Bytes of a micro-batch's memory states at the end of a sequence, in all layers of a tensor-parallel rank: those
    of `fixed` size, and those in `banks` that grow."""
    host: HostMemory
    """Those of them that lie in host memory where text is read without gradients, which training does not."""

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
        """Number of devices."""
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
        """FLOPs per token that is read; see `flops_per_token`."""
        return flops_per_token(self.config.model, self.config.data.sequence_length, backward_pass_of(self.config))

    @property
    def tokens_per_second(self) -> float:
        """Tokens that the whole job trains on in a second."""
        return self.config.training.batch_tokens / self.time.total

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization."""
        peak = self.machine.peak(self.config.training.precision) * self.devices
        return self.config.training.objective.readings * self.flops["training"] * self.tokens_per_second / peak

    @property
    def days(self) -> float:
        """Days that all steps take, without pauses."""
        return self.config.steps * self.time.total / 86_400

    @property
    def checkpoint(self) -> dict[str, float]:
        """Bytes of a checkpoint, with states that streams carry over, and seconds to write it from all nodes."""
        size = float(checkpoint_bytes(self.config))
        if self.config.data.feeding == "streams":
            rows = self.config.accumulation_steps(self.dp_size) * self.dp_size * self.config.parallel.tp
            size += rows * sum(self.states.values())
        nodes = -(-self.devices // self.machine.per_node)
        return {"bytes": size, "seconds": size / nodes / DISK}

    def to_dict(self) -> dict[str, object]:
        """Return plain data, for JSON."""
        switched = "no_recompute" if self.config.training.recompute else "recompute"
        return {
            "name": self.config.name,
            "devices": self.devices,
            "device": self.machine.name,
            "layout": self.layout.to_dict(),
            "parameters": parameter_counts(self.config.model),
            "flops_per_token": self.flops,
            "ranks": [rank.to_dict() for rank in self.ranks],
            switched: [rank.to_dict() for rank in self.switched_ranks],
            "states": self.states,
            "host": asdict(self.host),
            "fits": self.fits,
            "traffic": [{**asdict(sent), "data": sent.data} for sent in self.traffic],
            "bubble": self.time.bubble_share,
            "step_seconds": self.time.to_dict(),
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "days": self.days,
            "checkpoint": self.checkpoint,
        }


def checkpoint_bytes(config: RunConfig) -> int:
    """Return the bytes of a checkpoint's parameters.

    These are an FP32 weight and two moments of each that learns; a frozen one is saved as the model computes with it.
    """
    total, learning = parameter_counts(config.model)["total"], learning_of(config)
    count = total if learning is None else learning.total
    return 12 * count + DTYPES[config.training.precision].itemsize * (total - count)


def data_parallel(config: RunConfig, devices: int | None) -> int:
    """Return the data-parallel size of the run on so many devices; as configured if not given.

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
    activations: Activations | None = None,
) -> PlanReport:
    """Return the plan of a run.

    Args:
        dp_size: data-parallel ranks.
        activations: measurements of this model's activations at this precision, where there are some already.

    Raises: LayoutError for a layout that the model cannot be split into.
    """
    activations = activations or Activations.of_run(config, device=machine.kind)
    counts = place(config)
    layout = Layout(config, dp_size, tuple(counts))
    ranks = rank_reports(layout, activations)
    switched = config.training.model_copy(update={"recompute": not config.training.recompute})
    other_layout = Layout(config.model_copy(update={"training": switched}), dp_size, layout.counts)
    parameters = [StageParameters(rank.held.parameters, rank.held.learning) for rank in ranks]
    sizes = (config.training.micro_batch_size, DTYPES[config.training.precision], config.parallel.tp, config.chunks)
    return PlanReport(
        layout,
        machine,
        ranks,
        rank_reports(other_layout, activations),
        stage_traffic(layout, parameters, config.model.rows_per_chunk),
        step_time(layout, parameters, machine, StageWork(activations, machine.reached)),
        split_state_bytes(config.model, *sizes),
        host_memory(config.model, *sizes),
    )


def rank_reports(layout: Layout, activations: Activations) -> list[RankReport]:
    """Return the report of a rank of each stage. Raises LayoutError if the model cannot be split into the layout."""
    config, tp_size, dp_size = layout.config, layout.config.parallel.tp, layout.dp_size
    reports = []
    for stage, layers in enumerate(contiguous(layout.counts)):
        held = held_bytes(config, layers, tp_size, dp_size)
        reports.append(RankReport(stage, layers, held, step_peak(config, activations, layers, stage, tp_size, dp_size)))
    return reports
