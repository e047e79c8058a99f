"""The pictures of the benchmarks: measured figures beside published ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def beside(
    path: Path, title: str, label: str, series: Mapping[str, Mapping[str, float]], logarithmic: bool = False
) -> None:
    """Points by category, one color and line per series; categories that a series does not have are left out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    categories = list(dict.fromkeys(name for points in series.values() for name in points))
    figure = Figure(figsize=(max(5.0, 1.1 * len(categories)), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for name, points in series.items():
        x = [categories.index(category) for category in points]
        axis.plot(x, list(points.values()), marker="s" if name == "paper" else "o", label=name)
    axis.set_xticks(range(len(categories)), categories, rotation=30 if len(categories) > 4 else 0, ha="right")
    axis.set_ylabel(label)
    if logarithmic:
        axis.set_yscale("log")
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
    axis.set_title(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
