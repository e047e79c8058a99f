"""Plots as data, drawn twice: by plotly in the report's page, by matplotlib as PNG."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COLOURS = ("#2b6cb0", "#dd6b20", "#2f855a", "#805ad5", "#c53030", "#00838f", "#8d6e00", "#b83280", "#4a5568", "#5d4037")
DASHES = {"solid": "-", "dash": "--", "dot": ":"}


@dataclass(frozen=True)
class Series:
    """Points, a line, or both."""

    name: str
    """In the legend, once for all series of that name."""
    x: Sequence[Any]
    """Numbers, or names of categories."""
    y: Sequence[float]
    color: int = 0
    """Which of `COLOURS`, counted round."""
    line: bool = True
    marks: bool = False
    dash: str = "solid"
    error: Sequence[float] = ()
    """Half the length of error bars."""
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    """Borders of a band around the line."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Values of axes by which `Plot.by` colors, and what the mouse shows."""


@dataclass(frozen=True)
class Plot:
    """One picture."""

    name: str
    """Of its file and its place in the page."""
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    log_x: bool = False
    log_y: bool = False
    categories: tuple[str, ...] = ()
    """Of the x axis, in order, if it has names."""
    by: tuple[str, ...] = ()
    """Axes to choose colors by in the page; the PNG has the first. Without them each series has its own color."""


def color(number: int) -> str:
    """As #rrggbb."""
    return COLOURS[number % len(COLOURS)]


def colored(plot: Plot, axis: str) -> list[tuple[str, int]]:
    """(name, color) of each series by the values of `axis`."""
    values = list(dict.fromkeys(series.labels[axis] for series in plot.series))
    return [(series.labels[axis], values.index(series.labels[axis])) for series in plot.series]


def plotly_figure(plot: Plot) -> dict[str, Any]:
    """Data and layout for plotly.js. All text is escaped: plotly reads it as a kind of HTML."""
    data = [trace for series in plot.series for trace in _traces(series)]
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": _text(plot.x_label)}, "gridcolor": "#e2e8f0", "zeroline": False},
        "yaxis": {"title": {"text": _text(plot.y_label)}, "gridcolor": "#e2e8f0", "zeroline": False},
        "height": 460,
        "margin": {"l": 70, "r": 20, "t": 40, "b": 60},
        "plot_bgcolor": "white",
        "hovermode": "closest",
        "legend": {"itemsizing": "constant"},
        "font": {"family": "system-ui, sans-serif", "size": 13},
    }
    if plot.log_x:
        layout["xaxis"] |= {"type": "log", **_ticks([x for series in plot.series for x in series.x])}
    if plot.log_y:
        layout["yaxis"] |= {"type": "log", **_ticks([y for series in plot.series for y in series.y])}
    if plot.categories:
        names = [_text(name) for name in plot.categories]
        layout["xaxis"] |= {"type": "category", "categoryorder": "array", "categoryarray": names}
    if plot.by:
        layout["updatemenus"] = [_menu(plot)]
        _recolor(data, plot)
    shown: set[str] = set()
    for trace in data:  # one legend entry for each name
        if not trace.get("hoverinfo"):
            trace.setdefault("showlegend", trace["name"] not in shown)
            shown.add(trace["name"])
    return {"data": data, "layout": layout}


def _ticks(values: Sequence[float]) -> dict[str, Any]:
    """Ticks of a logarithmic axis at 1, 2 and 5, or at powers of ten alone: plotly writes bare digits between those."""
    first, last = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    steps = (1, 2, 5) if last - first <= 3 else (1,)
    at = [step * 10.0**power for power in range(first, last + 1) for step in steps]
    return {"tickvals": at, "ticktext": [short(value) for value in at]}


def short(value: float) -> str:
    """Three digits and a letter for the thousands: 1.2M, 500k, 0.05; powers of ten beyond those."""
    for limit, letter in ((1e15, ""), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{letter}" if letter else f"{value:.3g}"
    return f"{value:.3g}"


def _text(words: str) -> str:
    return html.escape(words, quote=False)


def _traces(series: Series) -> list[dict[str, Any]]:
    names = all(isinstance(x, str) for x in series.x)
    trace: dict[str, Any] = {
        "type": "scatter",
        "mode": "+".join([*["lines"][: series.line], *["markers"][: series.marks]]),
        "name": _text(series.name),
        "legendgroup": _text(series.name),
        "x": [_text(x) for x in series.x] if names else list(series.x),
        "y": list(series.y),
        "line": {"color": color(series.color), "width": 1.8, "dash": series.dash},
        "marker": {"color": color(series.color), "size": 8},
    }
    if series.error:
        trace["error_y"] = {"type": "data", "array": list(series.error), "visible": True, "thickness": 1.2}
    if series.labels:
        about = "<br>".join(f"{_text(axis)}: {_text(value)}" for axis, value in series.labels.items())
        trace["hovertemplate"] = f"{about}<br>%{{x:.4s}}, %{{y:.4f}}<extra></extra>"
    if not series.low:
        return [trace]
    band = {
        "type": "scatter", "mode": "lines", "fill": "toself", "fillcolor": f"{color(series.color)}22",
        "line": {"width": 0}, "x": [*series.x, *reversed(series.x)], "y": [*series.high, *reversed(series.low)],
        "name": trace["name"], "legendgroup": trace["name"], "showlegend": False, "hoverinfo": "skip",
    }  # fmt: skip
    return [band, trace]


def _recolor(data: list[dict[str, Any]], plot: Plot) -> None:
    change = _changes(plot, plot.by[0])
    for i, trace in enumerate(data):
        trace["line"] = {**trace["line"], "color": change["line.color"][i]}
        trace["marker"] = {**trace["marker"], "color": change["line.color"][i]}
        trace |= {name: change[name][i] for name in ("name", "legendgroup", "showlegend")}


def _menu(plot: Plot) -> dict[str, Any]:
    buttons = [{"method": "restyle", "label": _text(f"by {axis}"), "args": [_changes(plot, axis)]} for axis in plot.by]
    return {"type": "buttons", "direction": "right", "buttons": buttons, "x": 0, "xanchor": "left", "y": 1.02,
            "yanchor": "bottom", "pad": {"b": 4}}  # fmt: skip


def _changes(plot: Plot, axis: str) -> dict[str, list[Any]]:
    """What the traces have by an axis; a plot with `by` has one trace for each series."""
    named = colored(plot, axis)
    first = [name not in [earlier for earlier, _ in named[:i]] for i, (name, _) in enumerate(named)]
    names = [_text(name) for name, _ in named]
    colors = [color(number) for _, number in named]
    return {
        "name": names, "legendgroup": names, "showlegend": first, "line.color": colors, "marker.color": colors,
    }  # fmt: skip


def draw_png(plot: Plot, path: Path) -> None:
    """The same picture, standing still."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    named = colored(plot, plot.by[0]) if plot.by else [(series.name, series.color) for series in plot.series]
    shown: set[str] = set()
    for series, (name, number) in zip(plot.series, named, strict=True):
        x = [plot.categories.index(at) for at in series.x] if plot.categories else series.x
        if series.low:
            axes.fill_between(x, series.low, series.high, color=color(number), alpha=0.13, linewidth=0)
        axes.errorbar(
            x, series.y, list(series.error) or None, color=color(number), label=None if name in shown else name,
            linestyle=DASHES[series.dash] if series.line else "none", marker="o" if series.marks else None,
            markersize=5, linewidth=1.4, capsize=3,
        )  # fmt: skip
        shown.add(name)
    if plot.categories:
        axes.set_xticks(range(len(plot.categories)), plot.categories)
    axes.set_xscale("log" if plot.log_x else "linear")
    axes.set_yscale("log" if plot.log_y else "linear")
    axes.set_xlabel(plot.x_label)
    axes.set_ylabel(plot.y_label)
    axes.grid(alpha=0.3)
    if shown:
        axes.legend(title=plot.by[0] if plot.by else None, fontsize="small")
    figure.suptitle(plot.title, parse_math=False)
    figure.savefig(path, dpi=120)
