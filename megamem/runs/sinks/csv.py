"""The sink `csv`: chosen figures as a table that spreadsheets and plotting tools read."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from megamem.config.extensions import SINKS, SinkConfig
from megamem.runs.sinks.base import LogRecord, Sink
from megamem.runs.sinks.lines import GrowingLines


@SINKS.register
class CsvConfig(SinkConfig):
    """Figures of each record as a line of a CSV file in the run folder."""

    kind: Literal["csv"] = "csv"
    """`csv`"""
    file: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+\.csv$")] = "metrics.csv"
    """Name of the file in the run folder."""
    columns: Annotated[tuple[str, ...], Field(min_length=1)] = (
        "tokens", "loss", "grad_norm", "lr", "tokens_per_second", "val_loss",
    )  # fmt: skip
    """Names of the figures, after `step`, which is the first column; docs/watching.md lists them. Figures that a record
    does not have are left empty."""

    @field_validator("columns")
    @classmethod
    def _distinct(cls, columns: tuple[str, ...]) -> tuple[str, ...]:
        repeated = sorted({name for name in ("step", *columns) if ("step", *columns).count(name) > 1})
        if repeated:
            raise ValueError(f"{repeated[0]} is a column twice; `step` always is the first one")
        return columns

    def build(self, folder: Path, step: int) -> CsvFile:
        """See `SinkConfig.build`."""
        return CsvFile(folder / self.file, self.columns, step)


class CsvFile(Sink):
    """A CSV file with one line per record, written at once."""

    def __init__(self, path: Path, columns: tuple[str, ...], step: int = 0) -> None:
        """Open the file.

        A run that resumes keeps the lines up to its step, in the columns that are wanted now.

        Args:
            path: the file.
            columns: figures after `step`.
            step: where the run resumes, 0 for a new run.
        """
        self._columns, self._step = ("step", *columns), step
        self._lines = GrowingLines(path, self._kept)

    def _kept(self, lines: list[str]) -> list[str]:
        """Return the header and the rows up to the run's step; rows that are damaged are left out."""
        rows = [row for row in csv.DictReader(line.replace("\0", "") for line in lines) if _step(row) <= self._step]
        return [f"{self._line(row)}\n" for row in ({name: name for name in self._columns}, *rows)]

    def _line(self, row: Mapping[str, object]) -> str:
        text = io.StringIO()
        csv.DictWriter(text, self._columns, extrasaction="ignore", lineterminator="").writerow(row)
        return text.getvalue()

    def write(self, record: LogRecord) -> None:
        """See `Sink.write`."""
        self._lines.append(self._line(record))

    def close(self) -> None:
        """See `Sink.close`."""
        self._lines.close()


def _step(row: Mapping[str, str | None]) -> float:
    """Return a row's step; infinity where it has none."""
    step = row.get("step") or ""
    return int(step) if step.isdecimal() else math.inf
