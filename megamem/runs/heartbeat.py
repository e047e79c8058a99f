"""The run's heartbeat: a small file that says what the run is at, written again every few seconds by rank 0.

It is written by a thread of its own, so that a disk that does not answer holds up neither the training nor the
watchdog. Everything in it is known to the host already: nothing here asks the device or makes anyone wait.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ValidationError

from megamem.errors import MegamemError

if TYPE_CHECKING:
    from megamem.runs.sinks import Record
    from megamem.training.loop import Trainer
    from megamem.training.watchdog import Watchdog

NAME = "heartbeat.json"
"""In the run folder."""
INTERRUPTED = 130
"""Exit code after a second SIGINT."""
LAST_S = 5.0
"""What the last one may take: a run whose disk does not answer, which may be why it ends, must end all the same."""
State = Literal["starting", "training", "evaluating", "saving", "ended", "stopped", "failed"]
LAST: frozenset[State] = frozenset({"ended", "stopped", "failed"})
"""States in which nothing is written any more."""
# by the first word of what rank 0 is at
_STATES: dict[str, State] = {
    "starting": "starting",
    "loading": "starting",
    "step": "training",
    "validation": "evaluating",
    "validation,": "evaluating",
    "evaluation,": "evaluating",
    "checkpoint": "saving",
    "saving": "saving",
    "waiting": "saving",
}


class RankBeat(BaseModel):
    """One rank as rank 0's watchdog last heard of it."""

    rank: int
    name: str
    """With its coordinates."""
    process: str
    """host:pid"""
    action: str
    """What it was last at."""
    idle_s: float
    """Seconds since it began that."""
    waiting: bool
    """It is inside a collective."""
    waits: float | None
    """Share of the last minutes of training that it spent waiting in collectives; None until enough is known."""


class Beat(BaseModel):
    """What the file holds."""

    time: float
    """Seconds since 1970, by the clock of `host`."""
    interval_s: float
    """Seconds until the next one."""
    state: State
    exit_code: int | None = None
    """Of a run that failed."""
    line: str | None = None
    """Why it failed."""
    host: str
    pid: int
    """Of rank 0."""
    step: int
    """Finished optimizer steps."""
    steps: int
    """Of the whole run."""
    tokens: int | None = None
    """As of the last log line, like `loss` and `tokens_per_second`."""
    loss: float | None = None
    tokens_per_second: float | None = None
    eta_s: float | None = None
    """Seconds to the last step, by the last log line's speed."""
    val_loss: float | None = None
    """Of the last validation."""
    slow: str | None = None
    """Names the rank that the others of its stage wait for, if there is one."""
    ranks: list[RankBeat] = []


def state_of(action: str) -> State:
    """The state of a run whose rank 0 is at `action`."""
    return _STATES.get(action.split(" ", 1)[0], "training")


def read_beat(folder: Path) -> Beat | None:
    """A run folder's heartbeat; None where there is none or it cannot be read."""
    try:
        return Beat.model_validate_json((folder / NAME).read_bytes())
    except (OSError, ValidationError):
        return None


class Heartbeat:
    """Use as a context manager around a run; `begin` once the folder is this run's. A sink of its records."""

    def __init__(self, folder: Path | None, steps: int, interval_s: float) -> None:
        """folder: of the run; None on ranks that write nothing. steps: of the whole run."""
        self.folder, self.steps, self.interval = folder, steps, interval_s
        self._record: dict[str, Any] = {}
        self._logged_at = 0.0
        self._trainer: Trainer | None = None
        self._watchdog: Watchdog | None = None
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        if not self._thread.is_alive():
            return
        if error is None:
            self._last("stopped" if self._trainer is not None and self._trainer.stopped else "ended")
        elif isinstance(error, MegamemError):
            self.failed(error.exit_code, str(error))
        elif isinstance(error, KeyboardInterrupt):
            self.failed(INTERRUPTED, "interrupted")
        else:
            self.failed(MegamemError.exit_code, " ".join(f"{type(error).__name__}: {error}".split()))

    def begin(self) -> None:
        """Write the first one, and from now on one at each interval."""
        if self.folder is not None:
            self._write("starting")
            self._thread.start()

    def follow(self, trainer: Trainer, watchdog: Watchdog) -> None:
        """Take steps and ranks from these."""
        self._trainer, self._watchdog = trainer, watchdog

    def write(self, record: Record) -> None:
        """See `Sink.write`."""
        self._record = {**self._record, **record}
        if "eta_s" in record:
            self._logged_at = time.monotonic()

    def close(self) -> None:
        """See `Sink.close`. The run goes on after its last record."""

    def failed(self, code: int, line: str) -> None:
        """Write the last one, of a run that ends with exit code `code` and says `line`."""
        self._last("failed", code, line)

    def _last(self, state: State, code: int | None = None, line: str | None = None) -> None:
        def write() -> None:
            with self._lock:
                if not self._done.is_set():
                    self._done.set()
                    self._write(state, code, line)

        if self.folder is not None:
            writing = threading.Thread(target=write, daemon=True)
            writing.start()
            writing.join(LAST_S)

    def _beat(self) -> None:
        while not self._done.wait(self.interval):
            with self._lock:
                if not self._done.is_set():
                    self._write(state_of(self._watchdog.sightings[0].action if self._watchdog else "starting"))

    def _write(self, state: State, code: int | None = None, line: str | None = None) -> None:
        assert self.folder is not None
        temporary = self.folder / f".{NAME}.tmp"
        with contextlib.suppress(OSError):  # a run does not end because its disk is full for a while
            temporary.write_text(self._now(state, code, line).model_dump_json(indent=1) + "\n", encoding="utf-8")
            temporary.replace(self.folder / NAME)

    def _now(self, state: State, code: int | None, line: str | None) -> Beat:
        record, eta = self._record, self._record.get("eta_s")
        if eta is not None:
            eta = 0.0 if state in LAST else max(0.0, eta - (time.monotonic() - self._logged_at))
        return Beat(
            time=time.time(),
            interval_s=self.interval,
            state=state,
            exit_code=code,
            line=line,
            host=socket.gethostname(),
            pid=os.getpid(),
            step=self._trainer.step if self._trainer is not None else record.get("step", 0),
            steps=self.steps,
            tokens=record.get("tokens"),
            loss=record.get("loss"),
            tokens_per_second=record.get("tokens_per_second"),
            eta_s=eta,
            val_loss=record.get("val_loss"),
            slow=self._watchdog.slow if self._watchdog is not None else None,
            ranks=self._ranks(),
        )

    def _ranks(self) -> list[RankBeat]:
        if self._watchdog is None:
            return []
        now, name = time.monotonic(), self._watchdog.topology.name
        return [
            RankBeat(
                rank=rank,
                name=name(rank),
                process=seen.process,
                action=seen.action,
                idle_s=round(now - seen.progress_at, 1),
                waiting=seen.waiting,
                waits=seen.waits,
            )
            for rank, seen in self._watchdog.sightings.items()
        ]
