"""The search for the best layouts of a run on so many devices."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import itemgetter
from typing import TypeVar

from pydantic import ValidationError

from megamem.config.auto import AUTO_FIELDS, AutoField
from megamem.config.run import RunConfig
from megamem.config.training import Recompute
from megamem.pipeline.balancing import place_by, planned_costs
from megamem.pipeline.freezing import learning_of
from megamem.pipeline.placement import contiguous
from megamem.planning.activations import Activations
from megamem.planning.machines import Machine
from megamem.planning.measured_part import Share
from megamem.planning.plan import RankReport, rank_reports
from megamem.planning.rank_linears import tp_sizes
from megamem.planning.ranks import stage_parameters
from megamem.planning.step_time import Layout, StageWork, StepTime, step_time
from megamem.planning.traffic import StageParameters

T = TypeVar("T")
EQUALS = 1.1
"""Times over the fastest layout's up to which a prediction makes no difference."""
RECOMPUTED: tuple[Recompute, ...] = (False, "mlp", "mixer", True)
"""What of each layer may be computed again, in the order of simplicity."""
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
            "possible": self.possible,
            "tried": self.tried,
            "layouts": [candidate.to_dict() for candidate in self.best],
            "least": self.smallest.to_dict() if self.smallest else None,
        }


def _without_rows(layout: Layout) -> tuple[object, ...]:
    """Return everything about a layout but the rows of its micro-batches."""
    parallel, training = layout.config.parallel, layout.config.training
    return parallel.pp, parallel.tp, parallel.zero_stage, layout.config.bptt_chunks, training.recompute


def _simplicity(candidate: Candidate) -> tuple[float, ...]:
    """Return the key of simplicity: ranks that share less, less computed again, then more rows."""
    parallel, training = candidate.layout.config.parallel, candidate.layout.config.training
    again = RECOMPUTED.index(training.recompute)
    return parallel.pp, parallel.tp, parallel.zero_stage, again, -training.micro_batch_size


def _order(candidate: Candidate) -> tuple[float, ...]:
    """Return the key by which candidates are sorted, the best first."""
    return -candidate.layout.config.bptt_chunks, candidate.time.total


DP, WINDOW = "parallel.dp", "training.bptt_chunks"
ORDER: AutoField = "training.window_order"
"""Chosen last, for one layout (`Search.by_layer`)."""
LAYOUT_FIELDS = tuple(field for field in AUTO_FIELDS if field != ORDER)
"""Fields that are chosen together."""
SEARCHED = (*LAYOUT_FIELDS, DP, WINDOW)
"""All fields that a search may change."""


class Search:
    """A search over (PP, TP, DP, ZeRO, micro-batch, window, recomputation), or some of them; all else is as configured.

    Windows are the configured one and shorter ones, which cut gradients through memory: shorter ones come last, however
    fast they are. Of layouts that differ in the micro-batch alone the fastest that fits is kept, of equally fast ones
    the one with more rows.
    """

    def __init__(
        self,
        config: RunConfig,
        devices: int,
        machine: Machine,
        activations: Activations | None = None,
        fields: Collection[str] = SEARCHED,
        accept: Callable[[Layout], bool] = lambda layout: True,
    ) -> None:
        """Remember what is searched; see `make_plan`.

        fields: those that may change.
        accept: whether a layout that the configuration allows is to be considered.
        """
        self.config, self.devices, self.machine = config, devices, machine
        self.accept = accept
        self.activations = activations or Activations.of_run(config, device=machine.kind)
        self.work = StageWork(self.activations, machine.reached)
        self.fields = fields
        self.tried = 0
        """Number of layouts whose bytes were computed."""
        self.possible = 0
        """Number of layouts into which model and batch divide."""
        self.smallest: Candidate | None = None
        """Of those that were tried and do not fit, the one that needs the fewest bytes."""
        self._placed: dict[int, tuple[int, ...]] = {}

    def run(self, top: int = 10) -> SearchReport:
        """Return the `top` best layouts; they are tried until all others are estimated above the last of these."""

        def enough(fit: Sequence[Candidate], estimate: tuple[float, ...]) -> bool:
            return len(fit) >= top and estimate[:2] > _order(sorted(fit, key=_order)[top - 1])

        best = sorted(self._fitting(enough), key=_order)[:top]
        return SearchReport(
            self.config,
            self.devices,
            self.machine,
            best,
            self.tried,
            self.possible,
            None if best else self.smallest,
        )

    def simplest(self) -> Candidate | None:
        """Return the simplest of the layouts that fit and are about as fast as the fastest; None if none fits."""

        def enough(fit: Sequence[Candidate], estimate: tuple[float, ...]) -> bool:
            return bool(fit) and estimate[1] > EQUALS * min(candidate.time.total for candidate in fit)

        fit = self._fitting(enough)
        fastest = min((candidate.time.total for candidate in fit), default=0.0)
        return min((found for found in fit if found.time.total <= EQUALS * fastest), key=_simplicity, default=None)

    def by_layer(self, candidate: Candidate) -> Candidate | None:
        """Return a layout with its windows read layer by layer, if they can be read so and it fits then.

        This measures whole windows, which takes seconds.
        """
        config = candidate.layout.config
        training = config.training.model_copy(update={"window_order": "layers"})
        changed = config.model_copy(update={"training": training})
        if not self.valid(replace(candidate.layout, config=changed)):
            return None
        return Search(changed, self.devices, self.machine, self.activations.of_phase(changed), fields=()).simplest()

    def _fitting(self, enough: Callable[[Sequence[Candidate], tuple[float, ...]], bool]) -> list[Candidate]:
        """Return the layouts that fit, of those that differ in the micro-batch alone the fastest.

        They are tried in the order of a quick estimate of their time.

        enough: takes those that fit already and the estimate of the next, and says whether to end.
        """
        possible = list(self.layouts())
        self.activations.prepare({Share.of_run(layout.config, layout.config.parallel.tp) for layout in possible})
        layouts = sorted(((self._estimate(layout), layout) for layout in possible), key=itemgetter(0))
        fit: dict[tuple[object, ...], Candidate] = {}
        too_large: dict[tuple[object, ...], int] = {}
        self.tried, self.possible, self.smallest = 0, len(layouts), None
        for estimate, layout in layouts:
            if enough(list(fit.values()), estimate):
                break
            # more rows take more bytes: where fewer did not fit, these will not
            key, rows = _without_rows(layout), layout.config.training.micro_batch_size
            if rows >= too_large.get(key, rows + 1) or not self.valid(layout):
                continue
            time = self._time(layout, simulated=True)
            if key in fit and fit[key].time.total <= time.total:
                continue
            self.tried += 1
            candidate = Candidate(layout, time, rank_reports(layout, self.activations))
            if candidate.total <= self.machine.usable:
                fit[key] = candidate
            else:
                too_large[key] = rows
                if self.smallest is None or candidate.total < self.smallest.total:
                    self.smallest = candidate
        return list(fit.values())

    def layouts(self) -> Iterator[Layout]:
        """Return the layouts into which model, batch and devices divide."""
        model, parallel, training = self.config.model, self.config.parallel, self.config.training
        whole = self.config.bptt_chunks
        # numbers of stages, of tensor-parallel ranks within a node, and chunks of a window
        stages = [n for n in range(1, min(model.layers, self.devices) + 1) if self.devices % n == 0]
        stages = self._open("parallel.pp", stages, parallel.pp)
        shares = [n for n in tp_sizes(model) if n <= self.machine.per_node]
        shares = self._open("parallel.tp", shares, parallel.tp)
        windows = self._open(WINDOW, [n for n in range(1, whole + 1) if whole % n == 0], whole)
        if training.window_order == "layers":
            # no pipeline, and measured are windows of the configured length
            stages, windows = [1], [whole]
        recomputed = self._open("training.recompute", list(RECOMPUTED), training.recompute)
        # rows into which the batch may divide
        sizes = {training.micro_batch_size, *(2**n for n in range(MOST_ROWS.bit_length()))}
        sizes = set(self._open("training.micro_batch_size", list(sizes), training.micro_batch_size))
        for pp, tp in product(stages, shares):
            if self.devices % (pp * tp):
                continue
            dp = self.devices // (pp * tp)
            if DP not in self.fields and parallel.dp not in (None, dp):
                continue
            # DeepSpeed: a pipeline goes with ZeRO 1, and ZeRO 0 with FP32 only
            zeros = [1] if pp > 1 else [1] if dp == 1 else [1, 2, 3]
            zeros = self._open("parallel.zero_stage", [0, *zeros] if training.precision == "fp32" else zeros,
                               parallel.zero_stage)  # fmt: skip
            rows = [size for size in sorted(sizes) if self.config.global_rows % (size * dp) == 0]
            for zero, micro, window, recompute in product(zeros, rows, windows, recomputed):
                sequence_parallel = parallel.sequence_parallel and tp > 1
                parallel_changes: dict[str, object] = {
                    "pp": pp,
                    "tp": tp,
                    "dp": dp,
                    "zero_stage": zero,
                    "sequence_parallel": sequence_parallel,
                }
                if isinstance(parallel.placement, tuple) and "parallel.pp" in self.fields:
                    parallel_changes["placement"] = "flops"
                training_changes = {"micro_batch_size": micro, "bptt_chunks": window, "recompute": recompute}
                config = self.config.model_copy(
                    update={
                        "parallel": parallel.model_copy(update=parallel_changes),
                        "training": training.model_copy(update=training_changes),
                        "logging": self.config.logging.model_copy(update={"record_step": None}),  # a pipeline's
                    }
                )
                yield Layout(config, dp, self._place(pp))

    def _open(self, field: str, values: list[T], configured: T) -> list[T]:
        """Return the values that are tried for a field: all where it may change, else the configured one."""
        return values if field in self.fields else [configured]

    def _place(self, stages: int) -> tuple[int, ...]:
        """Return the number of layers of each stage."""
        if stages not in self._placed:
            given = self.config.parallel.placement
            counts = place_by(planned_costs(self.config), stages)
            if isinstance(given, tuple) and "parallel.pp" not in self.fields:
                counts = list(given)
            self._placed[stages] = tuple(counts)
        return self._placed[stages]

    def _time(self, layout: Layout, simulated: bool) -> StepTime:
        """Return the time of a step; see `step_time`."""
        tp_size = layout.config.parallel.tp
        model, learning = layout.config.model, learning_of(layout.config)
        parameters = [
            StageParameters(*(stage_parameters(model, layers, tp_size, counted) for counted in (None, learning)))
            for layers in contiguous(layout.counts)
        ]
        return step_time(layout, parameters, self.machine, self.work, simulated)

    def _estimate(self, layout: Layout) -> tuple[float, ...]:
        """Return the key by which layouts are tried: as `_order`, with a quick estimate of the time; then more rows."""
        training = layout.config.training
        return -layout.config.bptt_chunks, self._time(layout, simulated=False).total, -training.micro_batch_size

    def valid(self, layout: Layout) -> bool:
        """Return whether the configuration allows the layout, and it is to be considered."""
        try:
            RunConfig.model_validate(layout.config.model_dump())
        except ValidationError:
            return False
        return self.accept(layout)
