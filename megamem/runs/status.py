"""What runs are at, read from their folders by anyone who can see them: no process of the run is asked."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Group
from rich.table import Table
from rich.text import Text

from checkpoints.folder import FOLDER, MARKER, checkpoints_in
from megamem.errors import ConfigError
from megamem.runs.folder import RESULTS
from megamem.runs.heartbeat import Beat, read_beat

Condition = Literal["running", "stale", "stopped", "failed", "done"]
STALE_BEATS = 12
"""So many beats late, a run counts as dead: a minute at 5 s a beat, which also covers what network file systems keep
back from other hosts."""
GONE_BEATS = 3
"""So many beats late, a run whose process is gone on this host counts as dead."""
_STYLES: dict[Condition, str] = {
    "running": "green", "stale": "red", "stopped": "yellow", "failed": "red", "done": "cyan",
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One run folder."""

    folder: Path
    condition: Condition
    why: str | None
    """Of a stale or failed run."""
    beat: Beat | None
    age_s: float | None
    """Since its last sign of life; None without any."""
    result: dict[str, Any]
    """Figures of a run that is done, else empty."""
    checkpoint: tuple[int, float] | None
    """Step and age in seconds of the last complete one."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        beat = self.beat.model_dump(exclude={"state", "time"}) if self.beat is not None else {}
        step, age = self.checkpoint or (None, None)
        return {
            **beat,
            "run": str(self.folder),
            "state": self.condition,
            "at": self.beat.state if self.beat is not None else None,
            "why": self.why,
            "age_s": self.age_s,
            "step": self.step,
            "val_loss": self.val_loss,
            "checkpoint_step": step,
            "checkpoint_age_s": age,
        }

    @property
    def step(self) -> int | None:
        """Finished optimizer steps."""
        return self.beat.step if self.beat is not None else self.result.get("steps")

    @property
    def val_loss(self) -> float | None:
        """Of the evaluation at the end, or the last validation."""
        return self.result.get("val_loss", self.beat.val_loss if self.beat is not None else None)


def judge(beat: Beat, age_s: float, gone: Callable[[Beat], bool]) -> tuple[Condition, str | None]:
    """The condition of the run whose last heartbeat is `beat`, and why it is stale or has failed.

    Args:
        age_s: of the heartbeat.
        gone: whether its process is known to have ended.
    """
    if beat.state == "failed":
        return "failed", beat.line
    if beat.state == "ended":
        return "done", None
    if beat.state == "stopped":
        return "stopped", None
    if age_s > GONE_BEATS * beat.interval_s and gone(beat):
        return "stale", f"process {beat.pid} on {beat.host} has ended without a word"
    if age_s > STALE_BEATS * beat.interval_s:
        return "stale", f"no heartbeat for {span(age_s)}, one was due every {beat.interval_s:g} s"
    return "running", None


def process_gone(beat: Beat) -> bool:
    """Whether a heartbeat's process was on this host and exists no more."""
    if beat.host != socket.gethostname():
        return False
    try:
        os.kill(beat.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # somebody else's
        return False
    return False


def is_run(folder: Path) -> bool:
    """Whether a run was begun there."""
    return (folder / "config.yaml").is_file() and (folder / "environment.json").is_file()


def look(folder: Path) -> Run:
    """What the run in `folder` is at. Raises ConfigError if it is no run folder."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder")
    if not is_run(folder):
        raise ConfigError(f"{folder}: not a run folder (config.yaml and environment.json of a run); see `megamem runs`")
    beat, now = read_beat(folder), time.time()
    complete = [checkpoint for checkpoint in checkpoints_in(folder / FOLDER) if checkpoint.complete]
    newest = complete[-1] if complete else None
    result = _result(folder / RESULTS[0])
    condition: Condition
    if beat is None:
        condition, why = ("done", None) if result else ("stale", "no heartbeat")
    else:
        condition, why = judge(beat, now - beat.time, process_gone)
    return Run(
        folder,
        condition,
        why,
        beat,
        None if beat is None else max(0.0, now - beat.time),
        result if condition == "done" else {},
        None if newest is None else (newest.step, max(0.0, now - (newest.path / MARKER).stat().st_mtime)),
    )


def _result(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def runs_below(folder: Path) -> Iterator[Path]:
    """Run folders in `folder` and below it, in order of their names. Raises ConfigError if there is no such folder."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder")
    for path, folders, _ in os.walk(folder):
        if is_run(Path(path)):
            folders.clear()  # there is none within a run
            yield Path(path)
        folders.sort()


def span(seconds: float | None) -> str:
    """`h:mm:ss`; nothing for None."""
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _condition(run: Run) -> Text:
    code = f" ({run.beat.exit_code})" if run.condition == "failed" and run.beat is not None else ""
    return Text(f"{run.condition}{code}", style=_STYLES[run.condition])


def runs_table(runs: list[Run], below: Path) -> Table:
    """One line per run; names are relative to `below`."""
    table = Table()
    table.add_column("run", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for column in ("step", "loss", "val. loss", "tokens/s", "ETA", "age"):
        table.add_column(column, justify="right", no_wrap=True)
    for run in runs:
        beat = run.beat
        of = f"/{beat.steps}" if beat is not None else ""
        table.add_row(
            str(run.folder.relative_to(below)),
            _condition(run),
            _figure(run.step, "{}" + of),
            _figure(beat.loss if beat else None, "{:.4f}"),
            _figure(run.val_loss, "{:.4f}"),
            _figure(beat.tokens_per_second if beat else None, "{:,.0f}"),
            span(beat.eta_s) if beat is not None and run.condition == "running" else "",
            span(run.age_s),
        )
    return table


def run_page(run: Run) -> Group:
    """Everything about one run."""
    beat = run.beat
    facts = Table.grid(padding=(0, 2))
    facts.add_row("run", str(run.folder))
    facts.add_row("state", _condition(run))
    if run.why:
        facts.add_row("why", Text(run.why))
    if beat is None:
        return Group(facts)
    step, age = run.checkpoint or (None, None)
    rows = {
        "at": beat.state if run.condition == "running" else None,
        "heartbeat": f"{span(run.age_s)} ago, by process {beat.pid} on {beat.host}",
        "step": f"{beat.step} of {beat.steps}",
        "tokens": _figure(beat.tokens, "{:,}"),
        "loss": _figure(beat.loss, "{:.4f}"),
        "validation loss": _figure(run.val_loss, "{:.4f}"),
        "tokens/s": _figure(beat.tokens_per_second, "{:,.0f}"),
        "ETA": span(beat.eta_s) if run.condition == "running" else None,
        "last checkpoint": f"after step {step}, {span(age)} ago" if run.checkpoint else "none",
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
        ranks.add_row(rank.name, rank.process, Text(rank.action), span(rank.idle_s), now, _figure(rank.waits, "{:.0%}"))
    return Group(facts, ranks)
