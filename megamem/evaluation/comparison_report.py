"""The comparison of models for people: a table, a picture, and its files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from megamem.evaluation.comparison import ComparedModel, Comparison, Estimate
from megamem.evaluation.picture import GREY, add_position_axis, middle, new_figure, png
from megamem.evaluation.report import write_new

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NUMBERS, PICTURE = "comparison.json", "comparison.png"
FEW = 3
"""Models whose lines have room for a legend in each panel."""


def write_comparison(folder: Path, found: Comparison) -> None:
    """Write the numbers and the picture into a new folder. Raises DataError for one that is there or not writable."""
    write_new(folder, NUMBERS, found.to_dict(), {PICTURE: png(comparison_figure(found))})


def shown_estimate(estimate: Estimate) -> str:
    """Write nats with their sign and standard error: `-0.058 ± 0.010`."""
    return f"{estimate.value:+.3f}" if estimate.stderr is None else f"{estimate.value:+.3f} ± {estimate.stderr:.3f}"


def comparison_table(found: Comparison) -> Table:
    """Return a table with a line for each model, the reference first."""
    table = Table(title=f"Held-out loss beyond the first {found.chunk_size:,} tokens, in nats per token")
    table.add_column("model", overflow="fold")
    for name in ("loss", "difference", "better in", "memory gives"):
        table.add_column(name, justify="right", no_wrap=True)
    for model in found.models:
        is_reference = model is found.models[0]
        table.add_row(
            model.title, f"{model.loss:.3f}", "" if is_reference else shown_estimate(model.difference),
            "" if is_reference else f"{model.better:,} of {found.documents:,}", shown_estimate(model.memory_gain),
        )  # fmt: skip
    table.caption = (
        f"difference: from the first line; {found.tokens:,} tokens of {found.documents:,} documents\n"
        "memory gives: what the same model loses without its memory\n"
        "standard errors are over documents, which are paired"
    )
    return table


def comparison_figure(found: Comparison) -> Figure:
    """Return the picture: left losses by position, right what they are less the reference's."""
    figure = new_figure(12.8, 5.2)
    left, right = figure.subplots(1, 2)
    best = min(found.models[1:], key=lambda model: model.loss, default=found.models[0])
    figure.suptitle(
        f"{best.title} less {found.reference}: {shown_estimate(best.difference)} nats per token", fontsize=13,
        fontweight="bold",
    )  # fmt: skip
    _losses(left, found)
    _differences(right, found)
    for axes in (left, right):
        add_position_axis(axes, found.chunk_size)
    if len(found.models) > FEW:  # the other panel's legend has the colors
        left.get_legend().remove()
    return figure


def _losses(axes: Axes, found: Comparison) -> None:
    for number, model in enumerate(found.models):
        color = _color(number)
        axes.plot(
            _places(model), [part.loss for part in model.by_position], color=color, marker="o", markersize=4,
            linewidth=1.6, label=model.title,
        )  # fmt: skip
        off = [part.memory_off_loss for part in model.by_position]
        if model.memory_gain.value != 0:
            axes.plot(
                _places(model), off, color=color, linestyle=":", marker="o", markersize=4, markerfacecolor="none",
                linewidth=1.2, label=f"{model.title}, memory off",
            )  # fmt: skip
    axes.set_ylabel("loss (nats per token)")
    dotted = "; dotted: memory off" if len(found.models) > FEW else ""
    axes.set_title(
        f"{found.documents:,} held-out documents, {found.tokens:,} tokens beyond the first chunk{dotted}", fontsize=10
    )


def _differences(axes: Axes, found: Comparison) -> None:
    axes.axhline(0, color=_color(0), linewidth=1.2, label=found.reference if len(found.models) > FEW else None)
    for number, model in enumerate(found.models[1:], start=1):
        values = [part.difference.value for part in model.by_position]
        errors = [part.difference.stderr or 0.0 for part in model.by_position]
        axes.plot(
            _places(model), values, color=_color(number), marker="o", markersize=4, linewidth=1.6, label=model.title
        )
        axes.fill_between(
            _places(model), [value - error for value, error in zip(values, errors, strict=True)],
            [value + error for value, error in zip(values, errors, strict=True)],
            color=_color(number), alpha=0.15, linewidth=0,
        )  # fmt: skip
    axes.set_ylabel(f"loss less that of {found.reference}")
    axes.set_title("paired by document; bands of one standard error", fontsize=10)


def _color(number: int) -> str:
    """Return the color of a model: the reference is grey."""
    return GREY if number == 0 else f"C{(number - 1) % 10}"


def _places(model: ComparedModel) -> list[float]:
    """Return the geometric middle of each range of positions."""
    return [middle(part.first, part.last) for part in model.by_position]
