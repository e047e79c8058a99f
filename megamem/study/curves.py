"""Loss curves of a study's runs, finished or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megamem.study.collect import curve
from megamem.study.grid import PlannedRun
from megamem.study.plots import Plot, Series

POINTS = 150
"""Most points of a curve in the page; 400 runs have at most 60,000 together."""
TITLES = {"loss": "Training loss", "val_loss": "Validation loss while training"}


def loss_plots(runs: Sequence[PlannedRun]) -> list[Plot]:
    """Return a plot of each kind of loss that any run has a curve of, colored by the axis that the reader chooses."""
    names = list(runs[0].labels)
    varied = [axis for axis in names if len({run.labels[axis] for run in runs}) > 1]
    drawn = []
    for figure, title in TITLES.items():
        series = []
        for run in runs:
            points = thinned(curve(run, figure))
            if points:
                marks = len(points) < 20
                series.append(
                    Series(run.name, list(points), list(points.values()), marks=marks, labels={**run.labels})
                )  # fmt: skip
        if series:
            by = tuple(varied or names[:1])
            name = f"curves-{figure.replace('_', '-')}"
            drawn.append(Plot(name, title, "training tokens", figure, tuple(series), log_x=True, by=by))
    return drawn


def thinned(points: Mapping[float, float], most: int = POINTS) -> dict[float, float]:
    """Return at most `most` of the points, at even distances in their order, with the first and the last."""
    known = list(points.items())
    if len(known) <= most:
        return dict(known)
    return dict(known[round(i * (len(known) - 1) / (most - 1))] for i in range(most))
