"""Plots as data, which plotly draws in the report's page and matplotlib as PNG."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = ("#2b6cb0", "#dd6b20", "#2f855a", "#805ad5", "#c53030", "#00838f", "#8d6e00", "#b83280", "#4a5568", "#5d4037")
DASHES = {"solid": "-", "dash": "--", "dot": ":"}
Trace = dict[str, object]
"""A series as plotly.js takes it."""


@dataclass(frozen=True)
class Series:
    """Points, a line, or both."""

    name: str
    """Name in the legend, which has one entry for all series of that name."""
    x: Sequence[float | str]
    """Numbers, or names of categories."""
    y: Sequence[float]
    color: int = 0
    """Index into `COLORS`; after the last it begins again."""
    line: bool = True
    marks: bool = False
    dash: str = "solid"
    error: Sequence[tuple[float, float]] = ()
    """How far each error bar goes down and up."""
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    """Lower and upper borders of a band around the line."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Values of axes by which `Plot.by` colors, and what the mouse shows."""


@dataclass(frozen=True)
class Plot:
    """One picture."""

    name: str
    """Name of its file and its place in the page."""
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    log_x: bool = False
    log_y: bool = False
    categories: tuple[str, ...] = ()
    """Names on the x axis, in order, if it has names."""
    by: tuple[str, ...] = ()
    """Axes to choose colors by in the page; the PNG has the first. Without them each series has its own color."""


def color(number: int) -> str:
    """Return a color as #rrggbb."""
    return COLORS[number % len(COLORS)]


def colored(plot: Plot, axis: str) -> list[tuple[str, int]]:
    """Return name and color of each series by the values of `axis`."""
    values = list(dict.fromkeys(series.labels[axis] for series in plot.series))
    return [(series.labels[axis], values.index(series.labels[axis])) for series in plot.series]


def plotly_figure(plot: Plot) -> dict[str, object]:
    """Return data and layout for plotly.js. All text is escaped: plotly reads it as a kind of HTML."""
    by = _changes(plot, plot.by[0]) if plot.by else None
    data = [trace for number, series in enumerate(plot.series) for trace in _traces(series, by, number)]
    x_axis: dict[str, object] = {"title": {"text": _text(plot.x_label)}, "gridcolor": "#e2e8f0", "zeroline": False}
    y_axis: dict[str, object] = {"title": {"text": _text(plot.y_label)}, "gridcolor": "#e2e8f0", "zeroline": False}
    if plot.log_x:
        x_axis |= {"type": "log", **_ticks([float(x) for series in plot.series for x in series.x])}
    if plot.log_y:
        y_axis |= {"type": "log", **_ticks([y for series in plot.series for y in series.y])}
    if plot.categories:
        names = [_text(name) for name in plot.categories]
        x_axis |= {"type": "category", "categoryorder": "array", "categoryarray": names}
    layout: dict[str, object] = {
        "xaxis": x_axis,
        "yaxis": y_axis,
        "height": 460,
        "margin": {"l": 70, "r": 20, "t": 40, "b": 60},
        "plot_bgcolor": "white",
        "hovermode": "closest",
        "legend": {"itemsizing": "constant"},
        "font": {"family": "system-ui, sans-serif", "size": 13},
    }
    if plot.by:
        layout["updatemenus"] = [_menu(plot)]
    shown: set[object] = set()
    for trace in data:  # one legend entry for each name
        if not trace.get("hoverinfo"):
            trace.setdefault("showlegend", trace["name"] not in shown)
            shown.add(trace["name"])
    return {"data": data, "layout": layout}


def _ticks(values: Sequence[float]) -> dict[str, object]:
    """Return the ticks of a logarithmic axis: at 1, 2 and 5, or at powers of ten alone if these are many.

    plotly itself writes bare digits between powers of ten.
    """
    first, last = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    steps = (1, 2, 5) if last - first <= 3 else (1,)
    at = [step * 10.0**power for power in range(first, last + 1) for step in steps]
    return {"tickvals": at, "ticktext": [short(value) for value in at]}


def short(value: float) -> str:
    """Return three digits and a letter for the thousands: 1.2M, 500k, 0.05; powers of ten beyond those."""
    for limit, letter in ((1e15, ""), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{letter}" if letter else f"{value:.3g}"
    return f"{value:.3g}"


def _text(words: str) -> str:
    """Return text escaped for plotly."""
    return html.escape(words, quote=False)


def _traces(series: Series, by: Mapping[str, Sequence[object]] | None, number: int) -> list[Trace]:
    """Return a series as plotly's traces: the series itself, after its band if it has one.

    by: what an axis that colors the plot gives each trace (`_changes`); number: which of the plot's series this is.
    """
    hue = color(series.color) if by is None else by["line.color"][number]
    trace: Trace = {
        "type": "scatter",
        "mode": "+".join([*["lines"][: series.line], *["markers"][: series.marks]]),
        "name": _text(series.name),
        "legendgroup": _text(series.name),
        "x": [_text(x) if isinstance(x, str) else x for x in series.x],
        "y": list(series.y),
        "line": {"color": hue, "width": 1.8, "dash": series.dash},
        "marker": {"color": hue, "size": 8},
    }
    if series.error:
        below, above = ([bar[side] for bar in series.error] for side in (0, 1))
        trace["error_y"] = {
            "type": "data", "symmetric": False, "array": above, "arrayminus": below, "visible": True, "thickness": 1.2,
        }  # fmt: skip
    if series.labels:
        about = "<br>".join(f"{_text(axis)}: {_text(value)}" for axis, value in series.labels.items())
        trace["hovertemplate"] = f"{about}<br>%{{x:.4s}}, %{{y:.4f}}<extra></extra>"
    if by is not None:
        trace |= {name: by[name][number] for name in ("name", "legendgroup", "showlegend")}
    if not series.low:
        return [trace]
    band: Trace = {
        "type": "scatter", "mode": "lines", "fill": "toself", "fillcolor": f"{color(series.color)}22",
        "line": {"width": 0}, "x": [*series.x, *reversed(series.x)], "y": [*series.high, *reversed(series.low)],
        "name": trace["name"], "legendgroup": trace["name"], "showlegend": False, "hoverinfo": "skip",
    }  # fmt: skip
    return [band, trace]


def _menu(plot: Plot) -> dict[str, object]:
    """Return the buttons that color the plot by one axis or another."""
    buttons = [{"method": "restyle", "label": _text(f"by {axis}"), "args": [_changes(plot, axis)]} for axis in plot.by]
    return {"type": "buttons", "direction": "right", "buttons": buttons, "x": 0, "xanchor": "left", "y": 1.02,
            "yanchor": "bottom", "pad": {"b": 4}}  # fmt: skip


def _changes(plot: Plot, axis: str) -> dict[str, Sequence[object]]:
    """Return what the traces have if an axis colors them; a plot with `by` has one trace for each series."""
    named = colored(plot, axis)
    first = [name not in [earlier for earlier, _ in named[:i]] for i, (name, _) in enumerate(named)]
    names = [_text(name) for name, _ in named]
    colors = [color(number) for _, number in named]
    return {
        "name": names, "legendgroup": names, "showlegend": first, "line.color": colors, "marker.color": colors,
    }  # fmt: skip


def draw_png(plot: Plot, path: Path) -> None:
    """Draw the plot as a PNG file."""
    matplotlib_figure(plot).savefig(path, dpi=120)


def matplotlib_figure(plot: Plot) -> Figure:
    """Return the plot as a figure of matplotlib, which needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    named = colored(plot, plot.by[0]) if plot.by else [(series.name, series.color) for series in plot.series]
    shown: set[str] = set()
    for series, (name, number) in zip(plot.series, named, strict=True):
        x = [plot.categories.index(str(at)) for at in series.x] if plot.categories else series.x
        if series.low:
            axes.fill_between(x, series.low, series.high, color=color(number), alpha=0.13, linewidth=0)
        bars = list(zip(*series.error, strict=True)) or None
        axes.errorbar(
            x, series.y, bars, color=color(number), label=None if name in shown else name,
            linestyle=DASHES[series.dash] if series.line else "none", marker="o" if series.marks else None,
            markersize=5, linewidth=1.4, capsize=3,
        )  # fmt: skip
        shown.add(name)
    axes.set_xscale("log" if plot.log_x else "linear")
    axes.set_yscale("log" if plot.log_y else "linear")
    # after the scale, which puts its own ticks
    if plot.categories:
        axes.set_xticks(range(len(plot.categories)), plot.categories)
    axes.set_xlabel(plot.x_label)
    axes.set_ylabel(plot.y_label)
    axes.grid(alpha=0.3)
    if shown:
        axes.legend(title=plot.by[0] if plot.by else None, fontsize="small")
    figure.suptitle(plot.title, parse_math=False)
    return figure
