"""The sink that every run has: `metrics.jsonl` in the run folder."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

from megamem.runs.sinks.base import LogRecord, Sink
from megamem.runs.sinks.lines import GrowingLines

_log = logging.getLogger(__name__)


class JsonLines(Sink):
    """A file with one JSON object per record, written at once."""

    def __init__(self, path: Path, step: int = 0) -> None:
        """Open the file. step: where the run resumes; records of later steps, which are made again, are dropped.

        So are lines that are no records, of a damaged file; a warning says how many.
        """
        self._path, self._step = path, step
        self._lines = GrowingLines(path, self._kept)

    def _kept(self, lines: list[str]) -> list[str]:
        steps = [_step(line) for line in lines]
        if damaged := steps.count(None):
            _log.warning("%s: %d lines are damaged and left out", self._path, damaged)
        return [line for line, step in zip(lines, steps, strict=True) if step is not None and step <= self._step]

    def write(self, record: LogRecord) -> None:
        """See `Sink.write`. Numbers that are not finite become null: JSON has none."""
        clean = {
            name: None if value is not None and not math.isfinite(value) else value for name, value in record.items()
        }
        self._lines.append(json.dumps(clean))

    def close(self) -> None:
        """See `Sink.close`."""
        self._lines.close()


def _step(line: str) -> int | None:
    """Return the step of a record; None of a line that is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return step if isinstance(step, int) else None
