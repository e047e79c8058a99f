"""The interface of sinks."""

from __future__ import annotations

from megamem.runs.result import RunResult

LogRecord = dict[str, float | None]
"""The figures of one log line by name, `step` and `tokens` among them (docs/watching.md). None: not known."""


class Sink:
    """Somewhere that a run's metrics go. Rank 0 writes to all of its run's sinks; override what you need."""

    def write(self, record: LogRecord) -> None:
        """Take the record of one log line or one validation."""
        raise NotImplementedError

    def finish(self, result: RunResult) -> None:
        """Take the result of the run, after its final evaluation."""

    def close(self) -> None:
        """Write out what is still held back. Called once, however the run ends."""
