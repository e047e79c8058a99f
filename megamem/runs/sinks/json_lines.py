"""The sink that every run has: `metrics.jsonl` in the run folder."""

from __future__ import annotations

import json
import math
from pathlib import Path

from megamem.runs.sinks.base import LogRecord, Sink


class JsonLines(Sink):
    """A file with one JSON object per record, flushed at once."""

    def __init__(self, path: Path, step: int = 0) -> None:
        """Open the file. step: where the run resumes; records of later steps, which are made again, are dropped."""
        if path.exists():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            # a line without its end was being written when the process was killed
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
            path.with_suffix(".tmp").write_text("".join(kept), encoding="utf-8")
            path.with_suffix(".tmp").replace(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: LogRecord) -> None:
        """See `Sink.write`. Numbers that are not finite become null: JSON has none."""
        clean = {
            name: None if value is not None and not math.isfinite(value) else value for name, value in record.items()
        }
        self._file.write(json.dumps(clean) + "\n")
        self._file.flush()

    def close(self) -> None:
        """See `Sink.close`."""
        self._file.close()
