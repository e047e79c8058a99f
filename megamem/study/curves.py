"""Loss curves of a study's runs, finished or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megamem.study.collect import curve, mean_training_flops
from megamem.study.grid import PlannedRun
from megamem.study.plots import Plot, Series

POINTS = 150
"""Most points of a curve in the page; 400 runs have at most 60,000 together."""
TITLES = {"loss": "Training loss", "val_loss": "Validation loss while training"}


def loss_plots(runs: Sequence[PlannedRun]) -> list[Plot]:
    """Return a plot of each kind of loss that any run has a curve of, colored by the axis that the reader chooses.

    Losses are drawn over training tokens and, where a token costs more in one run than in another, validation losses
    over training FLOPs too.
    """
    names = list(runs[0].labels)
    varied = [axis for axis in names if len({run.labels[axis] for run in runs}) > 1]
    by = tuple(varied or names[:1])
    drawn = []
    for figure, title in TITLES.items():
        name = f"curves-{figure.replace('_', '-')}"
        if series := _curves(runs, figure, [1.0] * len(runs)):
            drawn.append(Plot(name, title, "training tokens", figure, series, log_x=True, by=by))
    flops = [mean_training_flops(run.config) for run in runs]
    if len(set(flops)) > 1 and (series := _curves(runs, "val_loss", flops)):
        title = f"{TITLES['val_loss']}, by compute"
        drawn.append(Plot("curves-val-loss-by-flops", title, "training FLOPs", "val_loss", series, log_x=True, by=by))
    return drawn


def _curves(runs: Sequence[PlannedRun], figure: str, per_token: Sequence[float]) -> tuple[Series, ...]:
    """Return the curve of each run that has one. per_token: what a token counts on the x axis, of each run."""
    found = []
    for run, cost in zip(runs, per_token, strict=True):
        points = thinned(curve(run, figure))
        if points:
            x, marks = [cost * tokens for tokens in points], len(points) < 20
            found.append(Series(run.name, x, list(points.values()), marks=marks, labels={**run.labels}))
    return tuple(found)


def thinned(points: Mapping[float, float], most: int = POINTS) -> dict[float, float]:
    """Return at most `most` of the points, at even distances in their order, with the first and the last."""
    known = list(points.items())
    if len(known) <= most:
        return dict(known)
    return dict(known[round(i * (len(known) - 1) / (most - 1))] for i in range(most))
