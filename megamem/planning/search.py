"""Layouts of a run on so many devices, best first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from operator import itemgetter
from typing import Any

from pydantic import ValidationError

from megamem.config.run import RunConfig
from megamem.pipeline.balancing import chunk_flops, place_by, planned_costs
from megamem.pipeline.placement import contiguous
from megamem.pipeline.simulate import Cost
from megamem.planning.activations import Activations
from megamem.planning.machines import Machine
from megamem.planning.plan import RankPlan, rank_plans
from megamem.planning.rank_linears import tp_sizes
from megamem.planning.ranks import stage_parameters
from megamem.planning.step_time import EFFICIENCY, Layout, StepTime, step_time

MOST_ROWS = 64
"""Of a micro-batch: powers of two up to here are tried, and the configured number."""


@dataclass(frozen=True)
class Candidate:
    """A layout that fits."""

    layout: Layout
    time: StepTime
    ranks: list[RankPlan]

    @property
    def total(self) -> float:
        """Bytes of the fullest rank."""
        return max(rank.total for rank in self.ranks)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            **self.layout.as_dict(),
            "bytes": round(self.total),
            "step_seconds": self.time.as_dict(),
            "tokens_per_second": self.layout.config.training.batch_tokens / self.time.total,
        }


@dataclass(frozen=True)
class Found:
    """What a search has found."""

    best: list[Candidate]
    tried: int
    """Layouts whose bytes were looked at."""
    possible: int
    """Layouts into which model and batch divide."""
    least: Candidate | None
    """If none fits: the one that needs least of those tried."""


def _without_rows(layout: Layout) -> tuple[object, ...]:
    parallel, training = layout.config.parallel, layout.config.training
    return parallel.pp, parallel.tp, parallel.zero_stage, layout.config.bptt_chunks, training.recompute


def _order(candidate: Candidate) -> tuple[float, ...]:
    return -candidate.layout.config.bptt_chunks, candidate.time.total


class Search:
    """Over (PP, TP, DP, ZeRO, micro-batch, window, recomputation). What the layout does not touch stays as configured.

    Windows are the configured one and shorter ones, which cut gradients through memory: those come last whatever they
    take. Of layouts that differ in the micro-batch alone the fastest that fits stands, of equals the larger.
    """

    def __init__(
        self,
        config: RunConfig,
        devices: int,
        machine: Machine,
        efficiency: float = EFFICIENCY,
        found: Activations | None = None,
    ) -> None:
        self.config, self.devices, self.machine, self.efficiency = config, devices, machine, efficiency
        self.activations = found or Activations(config.model, config.training.precision, config.chunks)
        self._placed: dict[int, tuple[tuple[int, ...], Cost]] = {}

    def run(self, top: int = 10) -> Found:
        """The best layouts.

        They are looked at in the order of a quick estimate of their time, until all others are estimated above the last
        of as many as are wanted.
        """
        layouts = sorted(((self._rank(layout), layout) for layout in self._layouts()), key=itemgetter(0))
        fit: dict[tuple[object, ...], Candidate] = {}
        least: Candidate | None = None
        tried = 0
        too_large: dict[tuple[object, ...], int] = {}
        for rank, layout in layouts:
            if len(fit) >= top and rank[:2] > _order(sorted(fit.values(), key=_order)[top - 1]):
                break
            key, rows = _without_rows(layout), layout.config.training.micro_batch_size
            if rows >= too_large.get(key, rows + 1) or not self._valid(layout):
                continue
            time = self._time(layout, simulated=True)
            if key in fit and fit[key].time.total <= time.total:
                continue
            tried += 1
            candidate = Candidate(layout, time, rank_plans(layout, self.activations))
            if candidate.total <= self.machine.usable:
                fit[key] = candidate
            else:
                too_large[key] = rows
                least = candidate if least is None or candidate.total < least.total else least
        best = sorted(fit.values(), key=_order)[:top]
        return Found(best, tried, len(layouts), None if best else least)

    def _layouts(self) -> Iterator[Layout]:
        """Those into which model, batch and devices divide."""
        model, parallel, training = self.config.model, self.config.parallel, self.config.training
        stages = [n for n in range(1, min(model.layers, self.devices) + 1) if self.devices % n == 0]
        shares = [n for n in tp_sizes(model) if n <= self.machine.per_node]
        windows = [n for n in range(1, self.config.bptt_chunks + 1) if self.config.bptt_chunks % n == 0]
        for pp, tp in product(stages, shares):
            if self.devices % (pp * tp):
                continue
            dp = self.devices // (pp * tp)
            zeros = (1,) if pp > 1 else (1, 2, 3)
            zeros = (0, *zeros) if training.precision == "fp32" else zeros
            sizes = {training.micro_batch_size, *(2**n for n in range(MOST_ROWS.bit_length()))}
            rows = [size for size in sorted(sizes) if self.config.global_rows % (size * dp) == 0]
            for zero, micro, window, recompute in product(zeros, rows, windows, (False, True)):
                if dp == 1 and zero > 1:
                    continue
                sequence_parallel = parallel.sequence_parallel and tp > 1
                changed: dict[str, object] = {
                    "pp": pp,
                    "tp": tp,
                    "dp": dp,
                    "zero_stage": zero,
                    "sequence_parallel": sequence_parallel,
                }
                if isinstance(parallel.placement, tuple):
                    changed["placement"] = "flops"
                how = {"micro_batch_size": micro, "bptt_chunks": window, "recompute": recompute}
                config = self.config.model_copy(
                    update={
                        "parallel": parallel.model_copy(update=changed),
                        "training": training.model_copy(update=how),
                        "logging": self.config.logging.model_copy(update={"record_step": None}),  # a pipeline's
                    }
                )
                yield Layout(config, dp, self._place(pp)[0])

    def _place(self, stages: int) -> tuple[tuple[int, ...], Cost]:
        """Layers of each stage, and what they cost."""
        if stages not in self._placed:
            counts = place_by(planned_costs(self.config), stages)
            self._placed[stages] = tuple(counts), chunk_flops(self.config.model, self.config.chunks, counts)
        return self._placed[stages]

    def _time(self, layout: Layout, simulated: bool) -> StepTime:
        stages = len(layout.counts)
        tp_size = layout.config.parallel.tp
        parameters = [stage_parameters(layout.config.model, layers, tp_size) for layers in contiguous(layout.counts)]
        flops = self._place(stages)[1]
        return step_time(layout, parameters, self.machine, self.efficiency, flops, simulated)

    def _rank(self, layout: Layout) -> tuple[float, ...]:
        training = layout.config.training
        return -layout.config.bptt_chunks, self._time(layout, simulated=False).total, -training.micro_batch_size

    def _valid(self, layout: Layout) -> bool:
        """Whether the run would start so."""
        try:
            RunConfig.model_validate(layout.config.model_dump())
        except ValidationError:
            return False
        return True
