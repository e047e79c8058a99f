"""The test behind `megamem verify-resume`: N steps of a configuration against N/2 + N/2 in new processes."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from checkpoints.folder import folder_name, open_checkpoint
from checkpoints.location import FOLDER
from checkpoints.read import compare
from megamem.config.run import RunConfig
from megamem.errors import STOPPED, CheckpointError


@dataclass(frozen=True)
class ResumeReport:
    """How a run in one piece compares with the same run in two."""

    steps: int
    """Optimizer steps of each run."""
    tensors_compared: int
    """Number of tensors in both checkpoints."""
    differences: tuple[str, ...]
    """The first differences, one line each; empty where both runs are equal bit for bit."""

    @property
    def bitwise_equal(self) -> bool:
        """True where nothing differs."""
        return not self.differences


SHOWN = 20
"""Number of differences that are reported."""


def verify_resume(
    arguments: Sequence[str], settings: RunConfig, steps: int, run: Callable[[list[str]], int]
) -> ResumeReport:
    """Train `steps` steps straight and in two halves, in a temporary folder beside the runs; compare every tensor.

    Args:
        arguments: arguments of `megamem train`: the recipe, its options and overrides.
        settings: the configuration that they give.
        steps: optimizer steps of each run, an even number.
        run: runs `megamem` with the given arguments in new processes and returns its exit code.

    Raises: CheckpointError if a run does not end well.
    """
    settings.runs_folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="verify-resume-", dir=settings.runs_folder) as name:
        folder = Path(name)
        common = [
            f"runs_folder={folder}", f"training.steps={steps}", "training.tokens=null",
            "training.stop_after=null",
            f"checkpoint.every={steps}", "checkpoint.resume=auto", "checkpoint.folder=null", "logging.every=1",
            "logging.wandb.mode=disabled",
            "logging.profile_steps=null", "logging.record_step=null", "evaluation.every=0", "data.validation=[]",
        ]  # fmt: skip

        def train(run_name: str, *more: str, ends_with: int = 0) -> None:
            code = run(["train", *arguments, *common, f"name={run_name}", *more])
            if code != ends_with:
                raise CheckpointError(f"verify-resume: the run {run_name} ended with exit code {code}")

        train("straight")
        train("halves", f"training.stop_after={steps // 2}", ends_with=STOPPED)
        train("halves")
        paths = [folder / run_name / FOLDER / folder_name(steps) for run_name in ("straight", "halves")]
        count, differences = compare(*(open_checkpoint(path) for path in paths))
        found = [str(difference) for difference in differences]
        found += _metrics(*(folder / run_name / "metrics.jsonl" for run_name in ("straight", "halves")))
        return ResumeReport(steps, count, tuple(found[:SHOWN]))


def _metrics(straight: Path, halves: Path) -> list[str]:
    """Return the differences between the lines that both runs logged, step by step."""

    def losses(path: Path) -> list[tuple[int, float, float]]:
        records = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        return [(r["step"], r["loss"], r["grad_norm"]) for r in records if "loss" in r]

    return [
        f"metrics of step {a[0]}: loss and gradient norm {a[1:]} and {b[1:]}"
        for a, b in zip(losses(straight), losses(halves), strict=True)
        if a != b
    ]
