"""The recovered share for people: a table, a picture, and its files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from megamem.evaluation.picture import BLUE, GREEN, GREY, ORANGE, add_position_axis, middle, new_figure, png
from megamem.evaluation.recovered import Interval, RecoveredReport, SharePart
from megamem.evaluation.report import write_new

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NUMBERS, PICTURE = "recovered_share.json", "recovered_share.png"


def write_recovered(folder: Path, report: RecoveredReport) -> None:
    """Write the numbers and the picture into a new folder. Raises DataError for one that is there or not writable."""
    numbers = {**report.figures(), **report.to_dict()}
    write_new(folder, NUMBERS, numbers, {PICTURE: draw_recovered(report)})


def shown_interval(found: Interval) -> str:
    """Return a share and its interval in percent: `41.2 % [35.0, 47.1]`."""
    if found.share is None:
        return "no gap"
    known = f"{100 * found.share:.1f} %"
    if found.low is None or found.high is None:
        return known
    return f"{known} [{100 * found.low:.1f}, {100 * found.high:.1f}]"


def recovered_table(report: RecoveredReport) -> Table:
    """Return a table of losses and shares: a line for each range of positions, and one for all."""
    table = Table(title=f"{report.memory}: what it recovers of the gap between {report.local} and {report.full}")
    for name in ("position", "tokens", "local", "full", "memory", "memory off"):
        table.add_column(name, justify="right")
    for name in ("recovered", "memory off", "by the memory"):
        table.add_column(f"{name} [95 %]", justify="right")
    for part in report.by_position:
        _add_row(table, f"{part.first:,}-{part.last:,}", part)
    table.add_section()
    _add_row(table, "beyond the first chunk", report.beyond_first_chunk)
    table.caption = (
        f"losses in nats per token; intervals by a bootstrap over {report.documents:,} documents"
        if report.documents > 1
        else "losses in nats per token; one document gives no interval"
    )
    return table


def _add_row(table: Table, name: str, part: SharePart) -> None:
    losses = (part.local_loss, part.full_loss, part.memory_loss, part.memory_off_loss)
    shares = (part.recovered, part.memory_off, part.by_memory)
    table.add_row(name, f"{part.tokens:,}", *(f"{loss:.4f}" for loss in losses), *map(shown_interval, shares))


def draw_recovered(report: RecoveredReport) -> bytes:
    """Return the picture as PNG: left the losses by position, right the share by position with its intervals."""
    figure = new_figure(12.8, 5.2)
    left, right = figure.subplots(1, 2)
    figure.suptitle(
        f"{report.memory}: recovered {shown_interval(report.beyond_first_chunk.recovered)}", fontsize=13,
        fontweight="bold",
    )  # fmt: skip
    _losses(left, report)
    _shares(right, report)
    for axes in (left, right):
        add_position_axis(axes, report.chunk_size)
    return png(figure)


def _losses(axes: Axes, report: RecoveredReport) -> None:
    places = _places(report.by_position)
    curves = {
        f"attention within chunks: {report.local}": ([p.local_loss for p in report.by_position], GREY, "-"),
        f"memory off: {report.memory}": ([p.memory_off_loss for p in report.by_position], ORANGE, ":"),
        f"with the memory: {report.memory}": ([p.memory_loss for p in report.by_position], ORANGE, "-"),
        f"full attention: {report.full}": ([p.full_loss for p in report.by_position], BLUE, "-"),
    }
    for label, (losses, color, line) in curves.items():
        axes.plot(places, losses, color=color, linestyle=line, marker="o", markersize=4, linewidth=1.6, label=label)
    axes.set_ylabel("loss (nats per token)")
    tokens = report.beyond_first_chunk.tokens
    axes.set_title(f"{report.documents:,} held-out documents, {tokens:,} tokens beyond the first chunk", fontsize=10)


def _shares(axes: Axes, report: RecoveredReport) -> None:
    for name, color in (("recovered", GREEN), ("memory_off", ORANGE)):
        found = [
            (place, getattr(p, name)) for place, p in zip(_places(report.by_position), report.by_position, strict=True)
        ]
        known = [(place, own) for place, own in found if own.share is not None]
        label = {"recovered": "recovered", "memory_off": "with the memory off"}[name]
        axes.plot(
            [place for place, _ in known], [own.share for _, own in known], color=color, marker="o", markersize=4,
            linewidth=1.6, label=label,
        )  # fmt: skip
        banded = [(place, own) for place, own in known if own.low is not None]
        axes.fill_between(
            [place for place, _ in banded], [own.low for _, own in banded], [own.high for _, own in banded],
            color=color, alpha=0.15, linewidth=0,
        )  # fmt: skip
    for level in (0, 1):
        axes.axhline(level, color=GREY, linewidth=0.8, linestyle="--")
    axes.set_ylabel("share of the gap")
    axes.set_title("0: attention within chunks, 1: full attention; bands of 95 %", fontsize=10)


def _places(parts: Sequence[SharePart]) -> list[float]:
    """Return the geometric middle of each range of positions."""
    return [middle(part.first, part.last) for part in parts]
