"""Tables and plots of a study: mean and standard deviation over seeds, beside published figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from megamem.errors import ConfigError
from megamem.study.config import READING, SEED, TRAINED, StudyConfig, TableConfig, matches
from megamem.study.plots import Plot, Series


@dataclass(frozen=True)
class Cell:
    """One cell: what was measured with each seed."""

    values: tuple[float, ...]
    seeds: tuple[str, ...]
    missing: int = 0
    """Seeds without a finite figure."""

    @property
    def mean(self) -> float:
        """Over seeds."""
        return mean(self.values)

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds, None of a single one."""
        return stdev(self.values) if len(self.values) > 1 else None

    def __str__(self) -> str:
        known = f"{self.mean:.4g}" if self.spread is None else f"{self.mean:.4g} ± {self.spread:.2g}"
        return f"{known} ({self.missing} not finite)" if self.missing else known


Cells = dict[tuple[str, str], Cell]


def axis_values(study: StudyConfig, axis: str) -> list[str]:
    """All values of an axis, in the order of the study."""
    if axis == READING:
        return [TRAINED, *study.readings]
    return [str(seed) for seed in study.seeds] if axis == SEED else list(study.axes[axis])


def cells(study: StudyConfig, table: TableConfig, records: Sequence[Mapping[str, Any]]) -> Cells:
    """(row, column) -> cell, of what has been measured.

    Raises: ConfigError where records of one cell differ in more than their seed, or none has the figure.
    """
    where = dict(table.where)
    if READING not in where and READING not in (table.rows, table.columns):
        where[READING] = (TRAINED,)
    axes = [axis for axis in (*study.axes, READING) if axis not in (table.rows, table.columns)]
    grouped: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for record in records:
        if matches(where, record):
            grouped.setdefault((record[table.rows], record[table.columns]), []).append(record)
    if records and not any(table.figure in record for record in records):
        raise ConfigError(f"tables.{table.name}.figure: {table.figure!r} is not among a run's figures")
    found = {}
    for place, group in grouped.items():
        for axis in axes:
            if len(mixed := sorted({record[axis] for record in group})) > 1:
                raise ConfigError(
                    f"tables.{table.name}: {axis} {', '.join(mixed)} fall into one cell; make it rows or columns, or "
                    f"choose one under where.{axis}"
                )
        # a run that diverged has no finite figure
        values = {record[SEED]: float(record[table.figure]) for record in group if table.figure in record}
        if values:
            found[place] = Cell(tuple(values.values()), tuple(values), len(group) - len(values))
    return found if table.against is None else differences(found, table.against)


def differences(found: Cells, reference: str) -> Cells:
    """Every cell minus that of the row `reference`, over the seeds that both have."""
    paired: Cells = {}
    for (row, column), cell in found.items():
        base = found.get((reference, column))
        if row == reference or base is None:
            continue
        known = dict(zip(base.seeds, base.values, strict=True))
        pairs = {s: v - known[s] for s, v in zip(cell.seeds, cell.values, strict=True) if s in known}
        if pairs:
            paired[row, column] = Cell(tuple(pairs.values()), tuple(pairs), cell.missing)
    return paired


def sides(study: StudyConfig, table: TableConfig, found: Cells) -> tuple[list[str], list[str]]:
    """Row and column names with at least one cell."""
    rows = [name for name in axis_values(study, table.rows) if any(name == row for row, _ in found)]
    columns = [name for name in axis_values(study, table.columns) if any(name == column for _, column in found)]
    return rows, columns


@dataclass(frozen=True)
class Filled:
    """A table in words."""

    heads: list[str]
    rows: list[list[str]]
    note: str


def filled(study: StudyConfig, table: TableConfig, found: Cells) -> Filled:
    """Measured figures first, published ones in columns of their own."""
    rows, columns = sides(study, table, found)
    published = [c for c in columns if any(c in table.paper.get(row, {}) for row in rows)]
    lines = []
    for row in rows:
        measured = [str(found[row, column]) if (row, column) in found else "" for column in columns]
        beside = [f"{table.paper.get(row, {})[c]:g}" if c in table.paper.get(row, {}) else "" for c in published]
        lines.append([row, *measured, *beside])
    seeds = max((len(cell.values) for cell in found.values()), default=0)
    figure = f"`{table.figure}`" + (f" minus that of {table.against}, seed by seed" if table.against else "")
    notes = [f"{figure}, mean ± standard deviation over up to {seeds} seeds."]
    notes += [f"Published: {table.source}."] if published and table.source else []
    heads = [table.rows, *columns, *(f"{column}, published" for column in published)]
    return Filled(heads, lines, " ".join(notes))


def markdown(table: TableConfig, words: Filled) -> str:
    """The table under its title."""
    lines = [words.heads, *words.rows]
    text = [f"| {' | '.join(cells)} |" for cells in lines]
    text.insert(1, "|---" * len(words.heads) + "|")
    return f"### {table.title}\n\n" + "\n".join(text) + f"\n\n{words.note}\n"


def as_json(table: TableConfig, found: Cells) -> dict[str, Any]:
    """The table as plain data."""
    return {
        "title": table.title, "figure": table.figure, "rows": table.rows, "columns": table.columns,
        "against": table.against,
        "cells": [
            {"row": row, "column": column, "mean": cell.mean, "spread": cell.spread, "values": list(cell.values),
             "published": table.paper.get(row, {}).get(column)}
            for (row, column), cell in found.items()
        ],
    }  # fmt: skip


def plots(study: StudyConfig, table: TableConfig, found: Cells) -> list[Plot]:
    """Points with error bars by column, a colour for each row; published figures in a plot of their own."""
    rows, columns = sides(study, table, found)
    figure = f"{table.figure}, less that of {table.against}" if table.against else table.figure
    measured, published = [], []
    for number, row in enumerate(rows):
        here = [(column, found[row, column]) for column in columns if (row, column) in found]
        measured.append(
            Series(
                row, [column for column, _ in here], [cell.mean for _, cell in here], number, marks=True,
                error=[cell.spread or 0.0 for _, cell in here],
            )
        )  # fmt: skip
        paper = table.paper.get(row, {})
        if known := [column for column in columns if column in paper]:
            published.append(Series(row, known, [paper[column] for column in known], number, marks=True, dash="dot"))
    drawn = [Plot(table.name, table.title, table.columns, figure, tuple(measured), categories=tuple(columns))]
    if published:
        title = f"{table.title}, published"
        name = f"{table.name}-published"
        drawn.append(Plot(name, title, table.columns, figure, tuple(published), categories=tuple(columns)))
    return drawn
