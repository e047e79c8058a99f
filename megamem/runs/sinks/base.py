"""The interface of sinks."""

from __future__ import annotations

from abc import ABC, abstractmethod

from megamem.runs.result import RunResult

LogRecord = dict[str, float | None]
"""The figures of one log line by name, `step` and `tokens` among them (docs/watching.md). None: not known."""


class Sink(ABC):
    """Somewhere that a run's metrics go. Rank 0 writes to all of its run's sinks; override what you need."""

    @abstractmethod
    def write(self, record: LogRecord) -> None:
        """Take the record of one log line or one validation."""

    def finish(self, result: RunResult) -> None:  # noqa: B027  (nothing to do for most)
        """Take the result of the run, after its final evaluation."""

    def close(self) -> None:  # noqa: B027
        """Write out what is still held back. Called once, however the run ends."""
