"""The search for the best layouts of a run on so many devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from operator import itemgetter

from pydantic import ValidationError

from megamem.config.run import RunConfig
from megamem.pipeline.balancing import chunk_flops, place_by, planned_costs
from megamem.pipeline.placement import contiguous
from megamem.pipeline.simulate import Cost
from megamem.planning.activations import Activations
from megamem.planning.machines import Machine
from megamem.planning.plan import RankReport, rank_reports
from megamem.planning.rank_linears import tp_sizes
from megamem.planning.ranks import stage_parameters
from megamem.planning.step_time import EFFICIENCY, Layout, StepTime, step_time

MOST_ROWS = 64
"""Most rows of a micro-batch: powers of two up to here are tried, and the configured number."""


@dataclass(frozen=True)
class Candidate:
    """A layout whose bytes and time are known."""

    layout: Layout
    time: StepTime
    ranks: list[RankReport]

    @property
    def total(self) -> float:
        """Bytes of the fullest rank."""
        return max(rank.total for rank in self.ranks)

    def to_dict(self) -> dict[str, object]:
        """Return plain data, for JSON."""
        return {
            **self.layout.to_dict(),
            "bytes": round(self.total),
            "step_seconds": self.time.to_dict(),
            "tokens_per_second": self.layout.config.training.batch_tokens / self.time.total,
        }


@dataclass(frozen=True)
class SearchReport:
    """The result of a search for layouts."""

    config: RunConfig
    devices: int
    machine: Machine
    efficiency: float
    best: list[Candidate]
    """The best layouts that fit, in order."""
    tried: int
    """Number of layouts whose bytes were computed."""
    possible: int
    """Number of layouts into which model and batch divide."""
    smallest: Candidate | None
    """If none fits, the one of those tried that needs the fewest bytes."""

    def to_dict(self) -> dict[str, object]:
        """Return plain data, for JSON."""
        return {
            "name": self.config.name,
            "devices": self.devices,
            "device": self.machine.name,
            "usable_bytes": self.machine.usable,
            "efficiency": self.efficiency,
            "possible": self.possible,
            "tried": self.tried,
            "layouts": [candidate.to_dict() for candidate in self.best],
            "least": self.smallest.to_dict() if self.smallest else None,
        }


def _without_rows(layout: Layout) -> tuple[object, ...]:
    """Return everything about a layout but the rows of its micro-batches."""
    parallel, training = layout.config.parallel, layout.config.training
    return parallel.pp, parallel.tp, parallel.zero_stage, layout.config.bptt_chunks, training.recompute


def _order(candidate: Candidate) -> tuple[float, ...]:
    """Return the key by which candidates are sorted, the best first."""
    return -candidate.layout.config.bptt_chunks, candidate.time.total


class Search:
    """A search over (PP, TP, DP, ZeRO, micro-batch, window, recomputation); everything else stays as configured.

    Windows are the configured one and shorter ones, which cut gradients through memory: shorter ones come last, however
    fast they are. Of layouts that differ in the micro-batch alone the fastest that fits is kept, of equally fast ones
    the one with more rows.
    """

    def __init__(
        self,
        config: RunConfig,
        devices: int,
        machine: Machine,
        efficiency: float = EFFICIENCY,
        activations: Activations | None = None,
    ) -> None:
        """Remember what is searched; see `make_plan`."""
        self.config, self.devices, self.machine, self.efficiency = config, devices, machine, efficiency
        self.activations = activations or Activations(config.model, config.training.precision, config.chunks)
        self._placed: dict[int, tuple[tuple[int, ...], Cost]] = {}

    def run(self, top: int = 10) -> SearchReport:
        """Return the `top` best layouts.

        They are tried in the order of a quick estimate of their time, until all others are estimated above
        the last of the `top` best ones.
        """
        layouts = sorted(((self._estimate(layout), layout) for layout in self._layouts()), key=itemgetter(0))
        fit: dict[tuple[object, ...], Candidate] = {}
        smallest: Candidate | None = None
        tried = 0
        too_large: dict[tuple[object, ...], int] = {}
        for estimate, layout in layouts:
            if len(fit) >= top and estimate[:2] > _order(sorted(fit.values(), key=_order)[top - 1]):
                break
            # more rows take more bytes: where fewer did not fit, these will not
            key, rows = _without_rows(layout), layout.config.training.micro_batch_size
            if rows >= too_large.get(key, rows + 1) or not self._valid(layout):
                continue
            time = self._time(layout, simulated=True)
            if key in fit and fit[key].time.total <= time.total:
                continue
            tried += 1
            candidate = Candidate(layout, time, rank_reports(layout, self.activations))
            if candidate.total <= self.machine.usable:
                fit[key] = candidate
            else:
                too_large[key] = rows
                smallest = candidate if smallest is None or candidate.total < smallest.total else smallest
        best = sorted(fit.values(), key=_order)[:top]
        return SearchReport(
            self.config,
            self.devices,
            self.machine,
            self.efficiency,
            best,
            tried,
            len(layouts),
            None if best else smallest,
        )

    def _layouts(self) -> Iterator[Layout]:
        """Return the layouts into which model, batch and devices divide."""
        model, parallel, training = self.config.model, self.config.parallel, self.config.training
        # numbers of stages, of tensor-parallel ranks within a node, and chunks of a window
        stages = [n for n in range(1, min(model.layers, self.devices) + 1) if self.devices % n == 0]
        shares = [n for n in tp_sizes(model) if n <= self.machine.per_node]
        windows = [n for n in range(1, self.config.bptt_chunks + 1) if self.config.bptt_chunks % n == 0]
        for pp, tp in product(stages, shares):
            if self.devices % (pp * tp):
                continue
            dp = self.devices // (pp * tp)
            # DeepSpeed: a pipeline goes with ZeRO 1, and ZeRO 0 with FP32 only
            zeros = (1,) if pp > 1 else (1, 2, 3)
            zeros = (0, *zeros) if training.precision == "fp32" else zeros
            # rows into which the batch divides
            sizes = {training.micro_batch_size, *(2**n for n in range(MOST_ROWS.bit_length()))}
            rows = [size for size in sorted(sizes) if self.config.global_rows % (size * dp) == 0]
            for zero, micro, window, recompute in product(zeros, rows, windows, (False, True)):
                if dp == 1 and zero > 1:
                    continue
                sequence_parallel = parallel.sequence_parallel and tp > 1
                parallel_changes: dict[str, object] = {
                    "pp": pp,
                    "tp": tp,
                    "dp": dp,
                    "zero_stage": zero,
                    "sequence_parallel": sequence_parallel,
                }
                if isinstance(parallel.placement, tuple):
                    parallel_changes["placement"] = "flops"
                training_changes = {"micro_batch_size": micro, "bptt_chunks": window, "recompute": recompute}
                config = self.config.model_copy(
                    update={
                        "parallel": parallel.model_copy(update=parallel_changes),
                        "training": training.model_copy(update=training_changes),
                        "logging": self.config.logging.model_copy(update={"record_step": None}),  # a pipeline's
                    }
                )
                yield Layout(config, dp, self._place(pp)[0])

    def _place(self, stages: int) -> tuple[tuple[int, ...], Cost]:
        """Return the number of layers of each stage, and their costs by action."""
        if stages not in self._placed:
            counts = place_by(planned_costs(self.config), stages)
            self._placed[stages] = tuple(counts), chunk_flops(self.config.model, self.config.chunks, counts)
        return self._placed[stages]

    def _time(self, layout: Layout, simulated: bool) -> StepTime:
        """Return the time of a step; see `step_time`."""
        stages = len(layout.counts)
        tp_size = layout.config.parallel.tp
        parameters = [stage_parameters(layout.config.model, layers, tp_size) for layers in contiguous(layout.counts)]
        flops = self._place(stages)[1]
        return step_time(layout, parameters, self.machine, self.efficiency, flops, simulated)

    def _estimate(self, layout: Layout) -> tuple[float, ...]:
        """Return the key by which layouts are tried: as `_order`, with a quick estimate of the time; then more rows."""
        training = layout.config.training
        return -layout.config.bptt_chunks, self._time(layout, simulated=False).total, -training.micro_batch_size

    def _valid(self, layout: Layout) -> bool:
        """Return whether the configuration allows the layout."""
        try:
            RunConfig.model_validate(layout.config.model_dump())
        except ValidationError:
            return False
        return True
