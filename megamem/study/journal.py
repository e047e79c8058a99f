"""The journal of a study's processes: `journal.jsonl`, a line whenever one begins or ends."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from megamem.errors import STOPPED

FILE = "journal.jsonl"
STARTED = "--- started "
"""Beginning of the line that the queue writes into a log before each process."""


@dataclass(frozen=True)
class History:
    """The processes so far of one training or evaluation."""

    seconds: float = 0.0
    """Time from beginnings to ends; a process that was killed with the queue adds none, as its end is not known."""
    attempts: int = 0
    """Number of times that it was begun."""
    code: int | None = None
    """Exit code of the last process; None while it runs, and of one that was killed with the queue."""
    failures: int = 0
    """Number of times that it ended neither well nor by a stop, since it last ended well."""
    began: float = 0.0
    """Time at which the last process began, in seconds since 1970."""

    @property
    def state(self) -> str:
        """One of `waiting`, `begun`, `stopped`, `failed` and `ended`."""
        if not self.attempts:
            return "waiting"
        if self.code is None:
            return "begun"
        if self.code in (STOPPED, -signal.SIGTERM, -signal.SIGINT):
            return "stopped"
        return "failed" if self.code else "ended"


class Journal:
    """Appends to the journal; lines that were written stay whole if the queue is killed."""

    def __init__(self, folder: Path) -> None:
        """Write to the journal in a study's folder."""
        self.path = folder / FILE

    def began(self, run: str, evaluation: str) -> None:
        """Note that a process was started."""
        self._write(run, evaluation, None)

    def ended(self, run: str, evaluation: str, code: int) -> None:
        """Note that it ended with an exit code (negative: by that signal)."""
        self._write(run, evaluation, code)

    def _write(self, run: str, evaluation: str, code: int | None) -> None:
        """Append a line."""
        # exact: it is compared with times of files
        line = json.dumps({"time": time.time(), "run": run, "evaluation": evaluation, "code": code})
        known = self.path.read_bytes() if self.path.is_file() else b""
        # a line that a full disk cut short must not spoil this one too
        border = "\n" if known and not known.endswith(b"\n") else ""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{border}{line}\n")


def read_journal(folder: Path) -> dict[tuple[str, str], History]:
    """Return histories by run and evaluation. A line that was cut short is left out."""
    path = folder / FILE
    found: dict[tuple[str, str], History] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        key = entry["run"], entry["evaluation"]
        known = found.get(key, History())
        if entry["code"] is None:
            found[key] = replace(known, attempts=known.attempts + 1, code=None, began=entry["time"])
        else:
            if not known.attempts:  # the line with its beginning was cut short
                known = History(attempts=1, began=entry["time"])
            spent = entry["time"] - known.began
            ended = replace(known, code=entry["code"], seconds=known.seconds + spent)
            failures = 0 if ended.state == "ended" else known.failures + (ended.state == "failed")
            found[key] = replace(ended, failures=failures)
    return found


def last_words(*logs: Path) -> str:
    """Return the last line that says why a process ended, of the first log that has one.

    That is a line of `megamem: ...`, or the last line of a traceback; empty if there is none. Of several processes that
    wrote to a log only the last one counts.
    """
    for log in logs:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
        last = takewhile(lambda line: not line.startswith(STARTED), reversed(lines))
        if reason := next((line.strip() for line in last if _names_cause(line)), ""):
            return reason
    return ""


def _names_cause(line: str) -> bool:
    """Return whether a line of a log says why the process ended."""
    return line.startswith("megamem: ") or bool(line and not line[0].isspace() and "Error" in line.split(":")[0])
