"""The run's heartbeat: a small file about the progress of the run, written again every few seconds by rank 0.

It is written by a thread of its own, so that a disk that does not answer holds up neither the training nor the
watchdog. Everything in it is known to the host already: nothing here waits for a device or another rank.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ValidationError

from megamem.errors import MegamemError
from megamem.runs.sinks.base import LogRecord, Sink

if TYPE_CHECKING:
    from megamem.training.loop import Trainer
    from megamem.training.watchdog import Watchdog

NAME = "heartbeat.json"
"""Name of the file in the run folder."""
INTERRUPTED = 130
"""Exit code after a second SIGINT."""
LAST_S = 5.0
"""Seconds that the last heartbeat may take: a run whose disk does not answer, which may be why it ends, must end."""
State = Literal["starting", "training", "evaluating", "saving", "ended", "stopped", "failed"]
LAST: frozenset[State] = frozenset({"ended", "stopped", "failed"})
"""States in which nothing is written any more."""
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
"""States of a run by the first word of rank 0's action."""


class RankBeat(BaseModel):
    """One rank as rank 0's watchdog last heard of it."""

    rank: int
    name: str
    """The rank's number with its coordinates."""
    process: str
    """host:pid"""
    action: str
    """The last action it began, in a few words."""
    idle_s: float
    """Seconds since it began that."""
    waiting: bool
    """True while it is inside a collective."""
    wait_share: float | None
    """Share of the last minutes of training that it spent waiting in collectives; None until enough is known."""


class Beat(BaseModel):
    """One heartbeat: the contents of the file."""

    time: float
    """Seconds since 1970, by the clock of `host`."""
    interval_s: float
    """Seconds until the next one."""
    state: State
    """What the run does."""
    exit_code: int | None = None
    """Exit code of a run that failed."""
    message: str | None = None
    """Why the run failed."""
    host: str
    """Host of rank 0."""
    pid: int
    """Process id of rank 0."""
    step: int
    """Finished optimizer steps."""
    steps: int
    """Optimizer steps of the whole run."""
    tokens: int | None = None
    """Tokens trained on, without padding, up to the last log line, to which `loss` and `tokens_per_second` belong."""
    loss: float | None = None
    """Training loss, nats per token."""
    tokens_per_second: float | None = None
    """Training speed over all ranks."""
    eta_s: float | None = None
    """Seconds to the last step, by the last log line's speed."""
    val_loss: float | None = None
    """Loss of the last validation, nats per token."""
    checkpoint_step: int | None = None
    """Step of the last complete checkpoint that the run has saved."""
    checkpoint_time: float | None = None
    """When it was completed, as `time`."""
    slow: str | None = None
    """Message that names the rank that the others of its stage wait for, if there is one."""
    ranks: list[RankBeat] = []
    """Every rank of the job."""


def state_of(action: str) -> State:
    """Return the state of a run whose rank 0 has begun `action`."""
    return _STATES.get(action.split(" ", 1)[0], "training")


def read_beat(folder: Path) -> Beat | None:
    """Read a run folder's heartbeat; None where there is none or it cannot be read."""
    try:
        return Beat.model_validate_json((folder / NAME).read_bytes())
    except (OSError, ValidationError):
        return None


class Heartbeat(Sink):
    """Writes the heartbeat: a context manager around a run, and a sink of its records.

    `begin` is called once the folder is this run's.
    """

    def __init__(self, folder: Path | None, interval_s: float) -> None:
        """Prepare the thread.

        Args:
            folder: the run's; None on ranks that write nothing.
            interval_s: seconds from one heartbeat to the next.
        """
        self.folder, self.steps, self.interval = folder, 0, interval_s
        self._record: LogRecord = {}
        self._logged_at = 0.0
        self._checkpoint: tuple[int | None, float | None] = (None, None)
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

    def begin(self, steps: int) -> None:
        """Write the first heartbeat, and from now on one at each interval. steps: those of the whole run."""
        self.steps = steps
        if self.folder is not None:
            if (before := read_beat(self.folder)) is not None:
                self._checkpoint = before.checkpoint_step, before.checkpoint_time
            self._write("starting")
            self._thread.start()

    def follow(self, trainer: Trainer, watchdog: Watchdog) -> None:
        """Take the step from `trainer`, and the state of all ranks from `watchdog`."""
        self._trainer, self._watchdog = trainer, watchdog

    def write(self, record: LogRecord) -> None:
        """See `Sink.write`."""
        self._record = {**self._record, **record}
        if "eta_s" in record:
            self._logged_at = time.monotonic()

    def failed(self, code: int, message: str) -> None:
        """Write the last heartbeat of a run that ends with exit code `code` and this message."""
        self._last("failed", code, message)

    def _last(self, state: State, code: int | None = None, message: str | None = None) -> None:
        """Write the last heartbeat, from a thread that is left behind where the disk does not answer."""

        def write() -> None:
            with self._lock:
                if not self._done.is_set():
                    self._done.set()
                    self._write(state, code, message)

        if self.folder is not None:
            writing = threading.Thread(target=write, daemon=True)
            writing.start()
            writing.join(LAST_S)

    def _beat(self) -> None:
        """Write a heartbeat at each interval: the body of the thread."""
        while not self._done.wait(self.interval):
            with self._lock:
                if not self._done.is_set():
                    self._write(state_of(self._watchdog.statuses[0].action if self._watchdog else "starting"))

    def _write(self, state: State, code: int | None = None, message: str | None = None) -> None:
        """Write the file, whole or not at all."""
        assert self.folder is not None
        temporary = self.folder / f".{NAME}.tmp"
        # a run does not end because its disk is full for a while
        with contextlib.suppress(OSError):
            temporary.write_text(self._now(state, code, message).model_dump_json(indent=1) + "\n", encoding="utf-8")
            temporary.replace(self.folder / NAME)

    def _now(self, state: State, code: int | None, message: str | None) -> Beat:
        """Return the heartbeat of this moment."""
        record, eta, tokens = self._record, self._record.get("eta_s"), self._record.get("tokens")
        if self._trainer is not None and self._trainer.saver is not None and self._trainer.saver.completed is not None:
            self._checkpoint = self._trainer.saver.completed
        if eta is not None:
            eta = 0.0 if state in LAST else max(0.0, eta - (time.monotonic() - self._logged_at))
        return Beat(
            time=time.time(),
            interval_s=self.interval,
            state=state,
            exit_code=code,
            message=message,
            host=socket.gethostname(),
            pid=os.getpid(),
            step=self._trainer.step if self._trainer is not None else int(record.get("step") or 0),
            steps=self.steps,
            tokens=None if tokens is None else int(tokens),
            loss=record.get("loss"),
            tokens_per_second=record.get("tokens_per_second"),
            eta_s=eta,
            val_loss=record.get("val_loss"),
            checkpoint_step=self._checkpoint[0],
            checkpoint_time=self._checkpoint[1],
            slow=self._watchdog.slow if self._watchdog is not None else None,
            ranks=self._ranks(),
        )

    def _ranks(self) -> list[RankBeat]:
        """Return what the watchdog knows of every rank."""
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
                wait_share=seen.wait_share,
            )
            for rank, seen in self._watchdog.statuses.items()
        ]
