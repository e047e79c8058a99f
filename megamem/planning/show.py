"""Plans as tables and lines for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich.table import Table

from megamem.config.training import Recompute
from megamem.costs.parameters import parameter_counts
from megamem.planning.arithmetic import describe
from megamem.planning.machines import DISK
from megamem.planning.measured_part import kernels_of, recurrence_of, shown_kernels
from megamem.planning.plan import PlanReport, RankReport
from megamem.planning.search import Candidate, SearchReport
from megamem.planning.step_time import StepTime

GIB = 2**30


def show_plan(plan: PlanReport) -> Iterator[Table | str]:
    """Return everything about a plan, as tables and lines in the order in which they are shown."""
    config, machine = plan.config, plan.machine
    yield f"{config.name} on {plan.devices} x {machine.name}"
    yield from describe(config, plan.dp_size)
    yield _parts(plan)
    yield _bytes(plan)
    usable = machine.usable / GIB
    yield (
        f"{'fits' if plan.fits else 'DOES NOT FIT'}: the fullest rank takes {plan.total / GIB:.2f} of {usable:.1f} GiB "
        f"({machine.memory / GIB:.1f} less {machine.reserve / GIB:.1f} for libraries, their buffers and fragmentation)"
    )
    yield (
        f"memory states of a micro-batch at the end of a sequence, all layers: {plan.states['fixed'] / GIB:.3f} GiB of "
        f"fixed size, {plan.states['banks'] / GIB:.3f} GiB in banks that grow"
    )
    if plan.host.held:
        yield (
            f"read without gradients: {plan.host.held / GIB:.3f} GiB of these in host memory; at most "
            f"{plan.host.to_device / GIB:.3f} GiB copied to the device by the last chunk and "
            f"{plan.host.for_token / GIB:.3f} GiB by one token more, {plan.host.to_host / GIB:.3f} GiB to the host by "
            "a chunk"
        )
    yield _traffic(plan)
    yield from _time(plan)
    saved = plan.checkpoint
    yield (
        f"checkpoint: {saved['bytes'] / 1e9:.1f} GB, {saved['seconds']:.0f} s to write at {DISK / 1e9:g} GB/s from "
        "each node"
    )


def _parts(plan: PlanReport) -> Table:
    """Return the table of parameters and FLOPs by part of the model."""
    table = Table(title="parameters and forward FLOPs per token")
    for column, justify in (("part", "left"), ("parameters", "right"), ("", "left"), ("FLOPs", "right")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    counts = [(name, f"{count:,}") for name, count in parameter_counts(plan.config.model).items()]
    flops = [(name.replace("_", " "), f"{value:,.0f}") for name, value in plan.flops.items()]
    for row in range(max(len(counts), len(flops))):
        left = counts[row] if row < len(counts) else ("", "")
        right = flops[row] if row < len(flops) else ("", "")
        table.add_row(left[0].replace("_", " "), left[1], *right)
    return table


def _bytes(plan: PlanReport) -> Table:
    """Return the table of bytes, a column for each stage: a terminal is wider than a pipeline is long."""
    table = Table(title="GiB of a rank of each stage when it holds most")
    for column in ("", *(f"stage {rank.stage}" for rank in plan.ranks)):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("layers", *(f"{rank.layers.start}-{rank.layers.stop - 1}" for rank in plan.ranks))
    table.add_row("parameters", *(f"{rank.held.parameters / 1e6:,.2f} M" for rank in plan.ranks))
    for name, size in _SIZES.items():
        table.add_row(name, *(f"{size(rank) / GIB:.2f}" for rank in plan.ranks))
    other = "total without recomputation" if plan.config.training.recompute else "total with recomputation of layers"
    table.add_row(other, *(f"{rank.total / GIB:.2f}" for rank in plan.switched_ranks))
    return table


_SIZES: dict[str, Callable[[RankReport], float]] = {
    "weights": lambda rank: rank.held.weights,
    "optimizer": lambda rank: rank.held.optimizer,
    "gradients": lambda rank: rank.peak.gradients,
    "activations in flight": lambda rank: rank.peak.in_flight,
    "chunk at work": lambda rank: rank.peak.working,
    "memory states": lambda rank: rank.peak.states,
    "between stages": lambda rank: rank.peak.borders,
    "gathered (ZeRO 3)": lambda rank: rank.peak.gathered,
    "while it is built": lambda rank: rank.building,
    "total": lambda rank: rank.total,
}


def _traffic(plan: PlanReport) -> Table:
    """Return the table of bytes sent in a step."""
    table = Table(title="GB that a rank of each stage sends in a step")
    for column in ("stage", "tensor parallel", "pipeline", "data parallel"):
        table.add_column(column, justify="right")
    for stage, sent in enumerate(plan.traffic):
        table.add_row(str(stage), *(f"{size / 1e9:.3f}" for size in (sent.tensor, sent.pipeline, sent.data)))
    return table


def _time(plan: PlanReport) -> Iterator[Table | str]:
    """Return the table of where the time of a step goes, and a line about the run."""
    time = plan.time
    table = Table(title=f"seconds of a step: {time.total:.3f}, predicted")
    for column, justify in (("", "left"), ("seconds", "right"), ("share", "right")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for name, seconds in _seconds_by_part(time).items():
        table.add_row(name, f"{seconds:.3f}", f"{seconds / time.total:.1%}")
    yield table
    yield (
        f"{plan.tokens_per_second:,.0f} tokens/s, MFU {plan.mfu:.1%}, bubble {time.bubble_share:.1%} of the busiest "
        f"stage's work; {plan.days:.2f} days for {plan.config.steps:,} steps"
    )
    device = plan.machine.kind
    kernels, recurrence = kernels_of(plan.config.training, device), recurrence_of(plan.config, device)
    yield f"assumed: {shown_kernels(kernels, recurrence)}"


def _seconds_by_part(time: StepTime) -> dict[str, float]:
    """Return the seconds of a step by what the busiest stage's ranks do."""
    return {
        "matrix products": time.compute.products,
        "attention": time.compute.attention,
        "memory traffic": time.compute.memory,
        "launches of operations": time.compute.launches,
        "tensor-parallel sums": time.tensor,
        "bubble": time.bubble,
        "data-parallel sums": time.data,
        "optimizer's update": time.update,
    }


def show_search(report: SearchReport) -> Iterator[Table | str]:
    """Return the table of the best layouts, or lines that say why there are none."""
    machine = report.machine
    usable = machine.usable / GIB
    if not report.possible:
        yield (
            f"no layout: {report.config.global_rows} sequences of a step (training.batch_tokens) on {report.devices} "
            "devices divide into none of PP, TP and DP"
        )
        return
    if not report.best:
        yield f"no layout of {report.config.name} fits into {report.devices} x {machine.name} ({usable:.1f} GiB each)"
        if report.smallest is not None:
            found = report.smallest
            yield f"least of {report.tried}: {layout_overrides(found)} takes {found.total / GIB:.1f} GiB"
        return
    table = Table(title=f"{report.config.name} on {report.devices} x {machine.name}: {usable:.1f} GiB each")
    columns = ("PP", "TP", "DP", "ZeRO", "rows", "window", "recompute", "GiB", "s/step", "bubble", "Mtok")
    for column in columns:
        table.add_column(column, justify="right")
    for candidate in report.best:
        table.add_row(*_cells(candidate))
    yield table
    yield "rows: of a micro-batch; window: chunks that gradients of memories span; Mtok: million tokens a second"
    yield f"{report.possible:,} layouts divide model and batch; bytes of {report.tried} were looked at"
    yield f"the first: {layout_overrides(report.best[0])}"


def _cells(candidate: Candidate) -> list[str]:
    """Return a row of the table of layouts."""
    config, time = candidate.layout.config, candidate.time
    parallel, training = config.parallel, config.training
    return [
        str(parallel.pp), str(parallel.tp), str(candidate.layout.dp_size), str(parallel.zero_stage),
        str(training.micro_batch_size), str(config.bptt_chunks), _shown_recompute(training.recompute),
        f"{candidate.total / GIB:.1f}", f"{time.total:.3f}", f"{time.bubble_share:.1%}",
        f"{training.batch_tokens / time.total / 1e6:,.3f}",
    ]  # fmt: skip


def _shown_recompute(recompute: Recompute) -> str:
    """Return what is computed again of each layer, in a word."""
    return recompute if isinstance(recompute, str) else "yes" if recompute else "no"


def layout_overrides(candidate: Candidate) -> str:
    """Return the layout as overrides for `megamem train`."""
    config = candidate.layout.config
    parallel, training = config.parallel, config.training
    return (
        f"parallel.pp={parallel.pp} parallel.tp={parallel.tp} parallel.dp={candidate.layout.dp_size} "
        f"parallel.zero_stage={parallel.zero_stage} training.micro_batch_size={training.micro_batch_size} "
        f"training.bptt_chunks={config.bptt_chunks} training.recompute={str(training.recompute).lower()} "
        f"parallel.sequence_parallel={str(parallel.sequence_parallel).lower()}"
        f"{'' if isinstance(parallel.placement, tuple) else f' parallel.placement={parallel.placement}'}"
    )
