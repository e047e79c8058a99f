"""The tables of a study and their plots: mean and standard deviation over seeds, beside published figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, stdev
from typing import get_args

from megamem.config.evaluation import SuiteName
from megamem.errors import ConfigError
from megamem.evaluation.recovered import GAP, OVER_CONTROL
from megamem.study.collect import Record
from megamem.study.config import EVALUATION, SEED, TRAINED, StudyConfig, TableConfig, evaluations_of, matches
from megamem.study.grid import PlannedRun
from megamem.study.plots import Plot, Series
from megamem.study.status import RunStatus

NOT_FINITE, NOT_EVALUATED = "without a finite figure", "not evaluated"
NO_GAP, INCOMPARABLE = "where full attention is no better than local", "not comparable"
"""Reasons why a seed of a finished run has no value."""


@dataclass(frozen=True)
class Cell:
    """One cell: the values that were measured with each seed."""

    values: tuple[float, ...]
    """Measured values; empty where every seed failed."""
    seeds: tuple[str, ...]
    """The seeds of the values."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Planned seeds without a value, and the reason: the run's state or one of the reasons above."""
    interval: tuple[float, float] | None = None
    """The interval that was measured with a single value (`FIGURE_low`, `FIGURE_high`), if any was."""
    incomparable: str = ""
    """Why a seed is not comparable, in words."""

    @property
    def mean(self) -> float | None:
        """Mean over seeds, None without a value."""
        return mean(self.values) if self.values else None

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds, None for fewer than two."""
        return stdev(self.values) if len(self.values) > 1 else None

    @property
    def bar(self) -> tuple[float, float]:
        """How far the error bar goes down and up: the standard deviation, or the interval of a single value."""
        if self.interval is not None and self.mean is not None:
            return max(self.mean - self.interval[0], 0.0), max(self.interval[1] - self.mean, 0.0)
        return self.spread or 0.0, self.spread or 0.0

    def __str__(self) -> str:
        """Return mean and standard deviation, and what is missing."""
        known = f"{self.mean:.4g}" if self.values else ""
        known += f" ± {self.spread:.2g}" if self.spread is not None else ""
        known += f" [{self.interval[0]:.4g}, {self.interval[1]:.4g}]" if self.interval else ""
        if not self.missing:
            return known
        reasons = ", ".join(f"{count} {reason}" for reason, count in Counter(self.missing.values()).items())
        return f"{known} ({len(self.values)} of {len(self.values) + len(self.missing)} seeds; {reasons})".strip()


Place = tuple[str, str]
"""Row and column."""
Cells = dict[Place, Cell]


def axis_values(study: StudyConfig, axis: str) -> list[str]:
    """Return all values of an axis, of `evaluation` or of `seed`, in the order of the study."""
    if axis == EVALUATION:
        return [TRAINED, *study.evaluations]
    return [str(seed) for seed in study.seeds] if axis == SEED else list(study.axes[axis])


def places(study: StudyConfig, table: TableConfig, runs: Sequence[PlannedRun]) -> dict[Place, list[tuple[str, str]]]:
    """Return the planned contents of each cell: run and evaluation of each seed.

    Raises: ConfigError where those of one cell differ in more than their seed.
    """
    where = dict(table.where)
    if EVALUATION not in where and EVALUATION not in (table.rows, table.columns):
        where[EVALUATION] = (TRAINED,)
    grouped: dict[Place, list[tuple[PlannedRun, dict[str, str]]]] = {}
    for run in runs:
        for evaluation in (TRAINED, *evaluations_of(study, run.labels)):
            labels = {**run.labels, EVALUATION: evaluation}
            if matches(where, labels):
                grouped.setdefault((labels[table.rows], labels[table.columns]), []).append((run, labels))
    # a cell holds seeds of one configuration
    for group in grouped.values():
        for axis in (*study.axes, EVALUATION):
            if len(mixed := sorted({labels[axis] for _, labels in group})) > 1:
                raise ConfigError(
                    f"tables.{table.name}: {axis} {', '.join(mixed)} fall into one cell; make it rows or columns, or "
                    f"choose one under where.{axis}"
                )
    return {place: [(run.name, labels[EVALUATION]) for run, labels in group] for place, group in grouped.items()}


def cells(study: StudyConfig, table: TableConfig, statuses: Sequence[RunStatus], found: Sequence[Record]) -> Cells:
    """Return the cells in which something was measured, or failed for good. Raises ConfigError as `places`."""
    by_run = {status.run.name: status for status in statuses}
    known = {(record.run, record.evaluation): record for record in found}
    made = {}
    for place, planned in places(study, table, [status.run for status in statuses]).items():
        values, missing, intervals, why = {}, {}, [], ""
        for run, evaluation in planned:
            seed, record = by_run[run].run.labels[SEED], known.get((run, evaluation))
            if record is None:
                missing[seed] = NOT_EVALUATED if by_run[run].trained else by_run[run].state
            elif table.figure in record.figures:
                values[seed] = float(record.figures[table.figure])
                ends = [f"{table.figure}_{side}" for side in ("low", "high")]
                if all(end in record.figures for end in ends):
                    intervals.append((record.figures[ends[0]], record.figures[ends[1]]))
            elif "recovered" in table.figure and record.figures.get(GAP, 1.0) <= 0:
                missing[seed] = NO_GAP
            elif "recovered" in table.figure and record.incomparable:
                missing[seed], why = INCOMPARABLE, record.incomparable
            elif _needs_more(study, table.figure, record):
                missing[seed] = NOT_EVALUATED
            else:  # such as that of a run that diverged
                missing[seed] = NOT_FINITE
        measured = any((run, evaluation) in known for run, evaluation in planned)
        if measured or "failed" in missing.values():
            interval = intervals[0] if len(values) == len(intervals) == 1 else None
            made[place] = Cell(tuple(values.values()), tuple(values), missing, interval, why)
    return made if table.against is None else differences(made, table.against)


def _needs_more(study: StudyConfig, figure: str, record: Record) -> bool:
    """Return whether a figure takes an evaluation that has not been made: of a suite, or of a model to compare with."""
    if "recovered" in figure:
        # that of a control comes after the others
        return study.recovered is not None and (GAP not in record.figures or figure == OVER_CONTROL)
    return figure.split(".")[0] in get_args(SuiteName)


def differences(found: Cells, reference: str) -> Cells:
    """Return every cell minus that of the row `reference`, over the seeds that both have."""
    paired: Cells = {}
    for (row, column), cell in found.items():
        base = found.get((reference, column))
        if row == reference or base is None:
            continue
        known = dict(zip(base.seeds, base.values, strict=True))
        pairs = {s: v - known[s] for s, v in zip(cell.seeds, cell.values, strict=True) if s in known}
        missing = {**{s: reason for s, reason in base.missing.items() if s in cell.seeds}, **cell.missing}
        if pairs or missing:
            paired[row, column] = Cell(tuple(pairs.values()), tuple(pairs), missing)
    return paired


def sides(study: StudyConfig, table: TableConfig, found: Cells) -> tuple[list[str], list[str]]:
    """Return the names of rows and of columns that have at least one cell."""
    rows = [name for name in axis_values(study, table.rows) if any(name == row for row, _ in found)]
    columns = [name for name in axis_values(study, table.columns) if any(name == column for _, column in found)]
    return rows, columns


@dataclass(frozen=True)
class Filled:
    """A table as text."""

    heads: list[str]
    rows: list[list[str]]
    note: str


def filled(study: StudyConfig, table: TableConfig, found: Cells) -> Filled:
    """Return the table as text: measured figures first, published ones in columns of their own."""
    rows, columns = sides(study, table, found)
    published = [c for c in columns if any(c in table.paper.get(row, {}) for row in rows)]
    lines = []
    for row in rows:
        measured = [str(found[row, column]) if (row, column) in found else "" for column in columns]
        beside = [f"{table.paper.get(row, {})[c]:g}" if c in table.paper.get(row, {}) else "" for c in published]
        lines.append([row, *measured, *beside])
    figure = f"`{table.figure}`" + (f" minus that of {table.against}, seed by seed" if table.against else "")
    notes = [f"{figure}, mean ± standard deviation over seeds."]
    if any(cell.interval for cell in found.values()):
        notes.append("In brackets, where there is one seed, the interval of 95 % over documents.")
    if why := next((cell.incomparable for cell in found.values() if cell.incomparable), ""):
        notes.append(f"Not comparable: {why}.")
    if not any(cell.values for cell in found.values()):
        notes.append(f"No finished run here has `{table.figure}` as a finite figure.")
    notes += [f"Published: {table.source}."] if published and table.source else []
    heads = [table.rows, *columns, *(f"{column}, published" for column in published)]
    return Filled(heads, lines, " ".join(notes))


def markdown(table: TableConfig, words: Filled) -> str:
    """Return the table in markdown, under its title."""
    lines = [words.heads, *words.rows]
    text = [f"| {' | '.join(cells)} |" for cells in lines]
    text.insert(1, "|---" * len(words.heads) + "|")
    return f"### {table.title}\n\n" + "\n".join(text) + f"\n\n{words.note}\n"


def as_json(table: TableConfig, found: Cells) -> dict[str, object]:
    """Return the table as plain data."""
    return {
        "title": table.title, "figure": table.figure, "rows": table.rows, "columns": table.columns,
        "against": table.against,
        "cells": [
            {"row": row, "column": column, "mean": cell.mean, "spread": cell.spread, "values": list(cell.values),
             "seeds": list(cell.seeds), "missing": dict(cell.missing), "interval": cell.interval,
             "published": table.paper.get(row, {}).get(column)}
            for (row, column), cell in found.items()
        ],
    }  # fmt: skip


def plots(study: StudyConfig, table: TableConfig, found: Cells) -> list[Plot]:
    """Return points with error bars by column, a color for each row; published figures in a plot of their own."""
    rows, columns = sides(study, table, found)
    figure = f"{table.figure}, less that of {table.against}" if table.against else table.figure
    bars = {"95 % over documents" for cell in found.values() if cell.interval}
    bars |= {"standard deviation over seeds" for cell in found.values() if cell.spread is not None}
    with_bars = f"{figure} (bars: {' or, of several, '.join(sorted(bars))})" if bars else figure
    measured, published = [], []
    for number, row in enumerate(rows):
        here = [(column, cell) for column in columns if (cell := found.get((row, column))) and cell.values]
        if here:
            measured.append(
                Series(
                    row, [column for column, _ in here], [mean(cell.values) for _, cell in here], number, marks=True,
                    error=[cell.bar for _, cell in here],
                )
            )  # fmt: skip
        paper = table.paper.get(row, {})
        if known := [column for column in columns if column in paper]:
            published.append(Series(row, known, [paper[column] for column in known], number, marks=True, dash="dot"))
    drawn = []
    if measured:
        shown = tuple(measured)
        drawn.append(Plot(table.name, table.title, table.columns, with_bars, shown, categories=tuple(columns)))
    if published:
        title = f"{table.title}, published"
        name = f"{table.name}-published"
        drawn.append(Plot(name, title, table.columns, figure, tuple(published), categories=tuple(columns)))
    return drawn
