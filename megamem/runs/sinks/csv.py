"""The sink `csv`: chosen figures as a table that spreadsheets and plotting tools read."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from megamem.config.extensions import SINKS, SinkConfig
from megamem.runs.sinks.base import LogRecord, Sink


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
    """A CSV file with one line per record, flushed at once."""

    def __init__(self, path: Path, columns: tuple[str, ...], step: int = 0) -> None:
        """Open the file.

        A run that resumes keeps the lines up to its step, in the columns that are wanted now.

        Args:
            path: the file.
            columns: figures after `step`.
            step: where the run resumes, 0 for a new run.
        """
        self._columns = ("step", *columns)
        kept = []
        if path.exists():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            # a line without its end was being written when the process was killed
            whole = csv.DictReader(line for line in lines if line.endswith("\n"))
            kept = [line for line in whole if int(line["step"]) <= step]
        partial = path.with_name(f".{path.name}.tmp")
        with partial.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, self._columns, extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(kept)
        partial.replace(path)
        self._file = path.open("a", encoding="utf-8", newline="")
        self._writer = csv.DictWriter(self._file, self._columns, extrasaction="ignore", lineterminator="\n")

    def write(self, record: LogRecord) -> None:
        """See `Sink.write`."""
        self._writer.writerow(record)
        self._file.flush()

    def close(self) -> None:
        """See `Sink.close`."""
        self._file.close()
