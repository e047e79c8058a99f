"""What became of a study's processes: `journal.jsonl`, a line whenever one begins or ends."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path

from megamem.errors import STOPPED

FILE = "journal.jsonl"


@dataclass(frozen=True)
class History:
    """Of one training or reading."""

    seconds: float = 0.0
    """From beginnings to ends; of a process that was killed with the queue no end is known."""
    attempts: int = 0
    """How often it was begun."""
    code: int | None = None
    """Exit code of the last process; None while it runs, and of one that was killed with the queue."""
    failures: int = 0
    """How often it ended otherwise than well or by a stop."""
    began: float = 0.0
    """When the last process began, seconds since 1970."""

    @property
    def state(self) -> str:
        """`waiting`, `begun`, `stopped`, `failed`, `ended`."""
        if not self.attempts:
            return "waiting"
        if self.code is None:
            return "begun"
        if self.code in (STOPPED, -signal.SIGTERM, -signal.SIGINT):
            return "stopped"
        return "failed" if self.code else "ended"


class Journal:
    """Appends lines: whole ones stay whole if the queue is killed."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE

    def began(self, run: str, reading: str) -> None:
        """A process was started."""
        self._write(run, reading, None)

    def ended(self, run: str, reading: str, code: int) -> None:
        """It ended with an exit code (negative: by that signal)."""
        self._write(run, reading, code)

    def _write(self, run: str, reading: str, code: int | None) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": round(time.time(), 3), "run": run, "reading": reading, "code": code}) + "\n")


def read_journal(folder: Path) -> dict[tuple[str, str], History]:
    """Histories by run and reading. A line cut short is left out."""
    path = folder / FILE
    found: dict[tuple[str, str], History] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        key = entry["run"], entry["reading"]
        known = found.get(key, History())
        if entry["code"] is None:
            found[key] = replace(known, attempts=known.attempts + 1, code=None, began=entry["time"])
        else:
            spent = entry["time"] - known.began
            ended = replace(known, code=entry["code"], seconds=known.seconds + spent)
            found[key] = replace(ended, failures=known.failures + (ended.state == "failed"))
    return found


def last_words(*logs: Path) -> str:
    """The last line that says why a process ended, of the first log with any: ours, or the end of a traceback."""
    for log in logs:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
        if said := next((line.strip() for line in reversed(lines) if _says_why(line)), ""):
            return said
    return ""


def _says_why(line: str) -> bool:
    return line.startswith("megamem: ") or bool(line and not line[0].isspace() and "Error" in line.split(":")[0])
