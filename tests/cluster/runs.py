"""Runs that last long enough to be interrupted, and what they logged."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.integration.commands import LENGTH, environment, run_tree, write_config

STEPS = 24
"""Of some tenths of a second: long enough to act in between, also on a busy machine."""


def tiny_run(data: Path, folder: Path, name: str = "run", **sections) -> Path:
    """Configuration file of a run of STEPS steps, each logged, validated at the end."""
    tree = run_tree(
        data,
        folder / "runs",
        name=name,
        training={"steps": STEPS, "batch_tokens": 16 * LENGTH, "micro_batch_size": 1, **sections.pop("training", {})},
        evaluation={"every": 0},
        logging={"every": 1},
        **sections,
    )
    return write_config(folder / f"{name}.yaml", tree)


def losses(run: Path) -> dict[int, float]:
    """Loss of each step as logged; a step that was logged twice is an error."""
    found: dict[int, float] = {}
    path = run / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.exists() else []:
        record = json.loads(line) if line.endswith("}") else {}
        if "loss" in record:
            assert record["step"] not in found, f"step {record['step']} was logged twice"
            found[record["step"]] = record["loss"]
    return found


def wait_for(ready: Callable[[], bool], timeout_s: float, said: Callable[[], str]) -> None:
    deadline = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < deadline, said()
        time.sleep(0.1)


def megamem(*arguments: str, ends_with: int = 0, **variables: str) -> str:
    """Standard output of a command that must succeed, or end with a code."""
    command = [sys.executable, "-m", "megamem", *arguments]
    done = subprocess.run(command, env={**environment(), **variables}, capture_output=True, text=True, check=False)
    assert done.returncode == ends_with, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
