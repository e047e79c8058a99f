"""The training curve, read from a run's metrics.jsonl."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Curves:
    """Points (tokens trained on, nats per token)."""

    training: tuple[tuple[float, float], ...]
    validation: tuple[tuple[float, float], ...]


def read_curves(path: Path) -> Curves:
    """Return the curves in metrics.jsonl: training has `loss`, validation `val_loss`. See `read_points`."""
    records = _records(path)
    return Curves(_points(records, "loss"), _points(records, "val_loss"))


def read_points(path: Path, figure: str) -> tuple[tuple[float, float], ...]:
    """(tokens trained on, figure) of the lines in metrics.jsonl that have it; empty without the file.

    A resumed run writes the steps since its last checkpoint again: of each step the last line counts. Lines that
    are no records, one cut short by a crash among them, are left out.
    """
    return _points(_records(path), figure)


def last_step(path: Path, figure: str) -> int:
    """Return the step of the last line in metrics.jsonl that has `figure`; 0 without one."""
    steps = (record.get("step") for record in _records(path) if figure in record)
    return max((step for step in steps if isinstance(step, int)), default=0)


def _records(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    return [record for line in lines if (record := _parse(line)) is not None]


def _parse(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _points(records: Iterable[dict[str, Any]], key: str) -> tuple[tuple[float, float], ...]:
    by_step: dict[int, tuple[float, float]] = {}
    for record in records:
        step, tokens, value = (record.get(name) for name in ("step", "tokens", key))
        if isinstance(step, int) and isinstance(tokens, int | float) and isinstance(value, int | float):
            by_step[step] = (float(tokens), float(value))
    return tuple(point for _, point in sorted(by_step.items()) if math.isfinite(point[1]))
