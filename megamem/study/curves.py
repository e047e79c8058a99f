"""Curves of a study's runs over training tokens, finished or not: losses, and the recovered share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megamem.study.collect import curve, mean_training_flops, recovered_curve, training_figures
from megamem.study.config import StudyConfig
from megamem.study.grid import PlannedRun
from megamem.study.plots import Plot, Series

POINTS = 150
"""Most points of a curve in the page; 400 runs have at most 60,000 together."""
TITLES = {"loss": "Training loss", "val_loss": "Validation loss while training"}


def curve_plots(study: StudyConfig, runs: Sequence[PlannedRun]) -> list[Plot]:
    """Return a plot of each figure that any run has a curve of, colored by the axis that the reader chooses.

    Losses are drawn over training tokens and, where a token costs more in one run than in another, validation losses
    over training FLOPs too; the recovered share over training tokens.
    """
    names = list(runs[0].labels)
    varied = [axis for axis in names if len({run.labels[axis] for run in runs}) > 1]
    by = tuple(varied or names[:1])
    drawn = []
    for figure, title in TITLES.items():
        name = f"curves-{figure.replace('_', '-')}"
        if series := _curves(runs, [curve(run, figure) for run in runs]):
            drawn.append(Plot(name, title, "training tokens", figure, series, log_x=True, by=by))
    costs = {mean_training_flops(run.config) for run in runs}
    if len(costs) > 1 and (series := _curves(runs, [_by_flops(run, thinned(curve(run, "val_loss"))) for run in runs])):
        title = f"{TITLES['val_loss']}, by compute"
        drawn.append(Plot("curves-val-loss-by-flops", title, "training FLOPs", "val_loss", series, log_x=True, by=by))
    if series := _curves(runs, [recovered_curve(study.recovered, run, runs) for run in runs]):
        title, y_label = "Recovered share while training", "recovered share"
        drawn.append(Plot("curves-recovered-share", title, "training tokens", y_label, series, by=by))
    return drawn


def _by_flops(run: PlannedRun, points: Mapping[float, float]) -> dict[float, float]:
    """Return a curve of a run over training FLOPs. points: the same over training tokens."""
    return {training_figures(run.config, tokens)["training_flops"]: y for tokens, y in points.items()}


def _curves(runs: Sequence[PlannedRun], curves: Sequence[Mapping[float, float]]) -> tuple[Series, ...]:
    """Return the curve of each run that has points. curves: y by x, of each run."""
    found = []
    for run, known in zip(runs, curves, strict=True):
        points = thinned(known)
        if points:
            x, marks = list(points), len(points) < 20
            found.append(Series(run.name, x, list(points.values()), marks=marks, labels={**run.labels}))
    return tuple(found)


def thinned(points: Mapping[float, float], most: int = POINTS) -> dict[float, float]:
    """Return at most `most` of the points, at even distances in their order, with the first and the last."""
    known = list(points.items())
    if len(known) <= most:
        return dict(known)
    return dict(known[round(i * (len(known) - 1) / (most - 1))] for i in range(most))
