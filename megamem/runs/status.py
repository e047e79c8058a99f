"""The status of runs, read from their folders by anyone who can see them: no process of a run is contacted."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Group
from rich.table import Table
from rich.text import Text

from checkpoints.folder import MARKER, checkpoints_in, folder_name
from checkpoints.location import FOLDER
from megamem.config.curriculum import FILE as CURRICULUM
from megamem.config.curriculum import lesson_folders
from megamem.errors import ConfigError
from megamem.runs.heartbeat import Beat, read_beat
from megamem.runs.result import RunResult, read_result

Condition = Literal["running", "stale", "stopped", "failed", "done", "waiting"]
STALE_BEATS = 12
"""Intervals without a heartbeat after which a run counts as dead: a minute at 5 s each, which also covers the time that
network file systems hide changes from other hosts."""
GONE_BEATS = 3
"""Intervals without a heartbeat after which a run whose process is gone on this host counts as dead."""
_STYLES: dict[Condition, str] = {
    "running": "green", "stale": "red", "stopped": "yellow", "failed": "red", "done": "cyan", "waiting": "white",
}  # fmt: skip


@dataclass(frozen=True)
class RunStatus:
    """The status of one run folder."""

    folder: Path
    condition: Condition
    reason: str | None
    """Why the run is stale or has failed."""
    beat: Beat | None
    """The last heartbeat."""
    age_s: float | None
    """Seconds since the last heartbeat; None without any."""
    result: RunResult | None
    """The result of a run that is done."""
    checkpoint: tuple[int, float] | None
    """Step and age in seconds of the last complete checkpoint."""

    def to_dict(self) -> dict[str, object]:
        """Return plain data, for JSON."""
        beat = self.beat.model_dump(exclude={"state", "time", "checkpoint_time"}) if self.beat is not None else {}
        step, age = self.checkpoint or (None, None)
        return {
            **beat,
            "run": str(self.folder),
            "state": self.condition,
            "at": self.beat.state if self.beat is not None else None,
            "reason": self.reason,
            "age_s": self.age_s,
            "step": self.step,
            "val_loss": self.val_loss,
            "checkpoint_step": step,
            "checkpoint_age_s": age,
        }

    @property
    def step(self) -> int | None:
        """Finished optimizer steps."""
        if self.beat is not None:
            return self.beat.step
        return self.result.steps if self.result is not None else None

    @property
    def val_loss(self) -> float | None:
        """The held-out loss of the final evaluation, or of the last validation."""
        found = self.result.evaluation.get("val_loss") if self.result is not None else None
        if isinstance(found, int | float):
            return found
        return self.beat.val_loss if self.beat is not None else None


def condition_of(beat: Beat, age_s: float, gone: Callable[[Beat], bool]) -> tuple[Condition, str | None]:
    """Return the condition of the run whose last heartbeat is `beat`, and why it is stale or has failed.

    Args:
        beat: the last heartbeat.
        age_s: seconds since it was written.
        gone: tells whether its process is known to have ended.
    """
    if beat.state == "failed":
        return "failed", beat.message
    if beat.state == "ended":
        return "done", None
    if beat.state == "stopped":
        return "stopped", None
    if age_s > GONE_BEATS * beat.interval_s and gone(beat):
        return "stale", f"process {beat.pid} on {beat.host} has ended without a word"
    if age_s > STALE_BEATS * beat.interval_s:
        return "stale", f"no heartbeat for {format_duration(age_s)}, one was due every {beat.interval_s:g} s"
    return "running", None


def process_gone(beat: Beat) -> bool:
    """Return whether a heartbeat's process was on this host and exists no more."""
    if beat.host != socket.gethostname():
        return False
    try:
        os.kill(beat.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        # the process exists and is somebody else's
        return False
    return False


def is_run(folder: Path) -> bool:
    """Return whether a run was started in `folder`."""
    return (folder / "config.yaml").is_file() and (folder / "environment.json").is_file()


def read_status(folder: Path) -> RunStatus:
    """Read the status of the run in `folder`. Raises ConfigError if it is no run folder."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder")
    if not is_run(folder):
        raise ConfigError(
            f"{folder}: not a run folder (config.yaml and environment.json of a run) or a curriculum's; see "
            "`megamem runs`"
        )
    beat, now = read_beat(folder), time.time()
    result = read_result(folder)
    condition: Condition
    if beat is None:
        condition, reason = ("done", None) if result else ("stale", "no heartbeat")
    else:
        condition, reason = condition_of(beat, now - beat.time, process_gone)
    return RunStatus(
        folder,
        condition,
        reason,
        beat,
        None if beat is None else max(0.0, now - beat.time),
        result if condition == "done" else None,
        _last_checkpoint(folder / FOLDER, beat, now),
    )


def is_curriculum(folder: Path) -> bool:
    """Return whether a curriculum was started in `folder`."""
    return (folder / CURRICULUM).is_file()


def lesson_statuses(folder: Path) -> list[RunStatus]:
    """Read the status of each lesson of the curriculum in `folder`, in order; one that has not begun is `waiting`.

    Raises: ConfigError where the curriculum's file cannot be read.
    """
    return [
        read_status(lesson) if is_run(lesson) else RunStatus(lesson, "waiting", None, None, None, None, None)
        for lesson in lesson_folders(folder)
    ]


def curriculum_condition(lessons: Sequence[RunStatus]) -> Condition:
    """Return the condition of a curriculum: that of the first lesson that is not done."""
    return next((lesson.condition for lesson in lessons if lesson.condition != "done"), "done")


def _last_checkpoint(folder: Path, beat: Beat | None, now: float) -> tuple[int, float] | None:
    """Return step and age of the last complete checkpoint in `folder`; where it is none, of the one the run tells of.

    Checkpoints elsewhere may be in an object store, which is not asked.
    """
    steps = [checkpoint.step for checkpoint in checkpoints_in(folder) if checkpoint.complete]
    if steps:
        return steps[-1], max(0.0, now - (folder / folder_name(steps[-1]) / MARKER).stat().st_mtime)
    if beat is not None and beat.checkpoint_step is not None and beat.checkpoint_time is not None:
        return beat.checkpoint_step, max(0.0, now - beat.checkpoint_time)
    return None


def find_runs(folder: Path) -> Iterator[Path]:
    """Yield run folders in `folder` and below it, in order of their names.

    Raises:
        ConfigError: there is no such folder.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder")
    for path, folders, _ in os.walk(folder):
        if is_run(Path(path)):
            # no run lies within another
            folders.clear()
            yield Path(path)
        folders.sort()


def format_duration(seconds: float | None) -> str:
    """Write a time as `h:mm:ss`; nothing for None."""
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _figure(value: float | None, form: str) -> str:
    """Write a figure; nothing for None."""
    return "" if value is None else form.format(value)


def _condition(run: RunStatus) -> Text:
    """Write the condition in its color, with the exit code of a run that failed."""
    code = f" ({run.beat.exit_code})" if run.condition == "failed" and run.beat is not None else ""
    return Text(f"{run.condition}{code}", style=_STYLES[run.condition])


def runs_table(runs: Sequence[RunStatus], below: Path) -> Table:
    """Make a table with a line per run; names are relative to `below`."""
    table = Table()
    table.add_column("run", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for column in ("step", "loss", "val. loss", "tokens/s", "ETA", "age"):
        table.add_column(column, justify="right", no_wrap=True)
    for run in runs:
        beat = run.beat
        steps = f"/{beat.steps}" if beat is not None else ""
        table.add_row(
            str(run.folder.relative_to(below)),
            _condition(run),
            _figure(run.step, "{}" + steps),
            _figure(beat.loss if beat else None, "{:.4f}"),
            _figure(run.val_loss, "{:.4f}"),
            _figure(beat.tokens_per_second if beat else None, "{:,.0f}"),
            format_duration(beat.eta_s) if beat is not None and run.condition == "running" else "",
            format_duration(run.age_s),
        )
    return table


def run_page(run: RunStatus) -> Group:
    """Make a page with everything about one run."""
    beat = run.beat
    facts = Table.grid(padding=(0, 2))
    facts.add_row("run", str(run.folder))
    facts.add_row("state", _condition(run))
    if run.reason:
        facts.add_row("reason", Text(run.reason))
    if beat is None:
        return Group(facts)
    step, age = run.checkpoint or (None, None)
    rows = {
        "at": beat.state if run.condition == "running" else None,
        "heartbeat": f"{format_duration(run.age_s)} ago, by process {beat.pid} on {beat.host}",
        "step": f"{beat.step} of {beat.steps}",
        "tokens": _figure(beat.tokens, "{:,}"),
        "loss": _figure(beat.loss, "{:.4f}"),
        "validation loss": _figure(run.val_loss, "{:.4f}"),
        "tokens/s": _figure(beat.tokens_per_second, "{:,.0f}"),
        "ETA": format_duration(beat.eta_s) if run.condition == "running" else None,
        "last checkpoint": f"after step {step}, {format_duration(age)} ago" if run.checkpoint else "none",
        "slow": beat.slow if run.condition == "running" else None,
    }
    for name, value in rows.items():
        if value:
            facts.add_row(name, Text(value))
    if not beat.ranks:
        return Group(facts)
    ranks = Table()
    for column in ("rank", "process", "last at"):
        ranks.add_column(column, overflow="fold")
    for column in ("for", "now", "waits"):
        ranks.add_column(column, justify="right")
    for rank in beat.ranks:
        now = "waiting" if rank.waiting else "working"
        ranks.add_row(
            rank.name,
            rank.process,
            Text(rank.action),
            format_duration(rank.idle_s),
            now,
            _figure(rank.wait_share, "{:.0%}"),
        )
    return Group(facts, ranks)
