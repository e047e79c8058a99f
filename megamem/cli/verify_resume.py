"""`megamem verify-resume`: the test that a run in two parts is the run in one piece, on one's own configuration."""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated

import typer

from megamem.cli.options import Json, ModelFile, Overrides, RecipePath
from megamem.cli.output import write_json, write_line
from megamem.errors import ConfigError


def verify_resume(
    config: RecipePath,
    overrides: Overrides = None,
    model: ModelFile = None,
    steps: Annotated[int, typer.Option(min=2, help="optimizer steps of each run; even")] = 10,
    as_json: Json = False,
) -> None:
    """Train some steps straight and in two halves with new processes; exit code 0 only if they agree bit for bit."""
    from checkpoints.verify_resume import verify_resume as check
    from megamem.config.recipe import load_run

    if steps % 2:
        raise ConfigError(f"verify-resume: --steps {steps} has no half; give an even number")
    settings = load_run(config, overrides or [], model)

    def run(arguments: list[str]) -> int:
        command = [sys.executable, "-m", "megamem", *arguments]
        return subprocess.run(command, stdout=sys.stderr if as_json else None, check=False).returncode

    arguments = [str(config), *(["--model", str(model)] if model else []), *(overrides or [])]
    report = check(arguments, settings, steps, run)
    if as_json:
        found = {"bitwise_equal": report.bitwise_equal, "tensors_compared": report.tensors_compared}
        write_json({**found, "steps": steps, "differences": report.differences})
    else:
        for line in report.differences:
            write_line(line)
        equal = "equal, bit for bit" if report.bitwise_equal else "NOT EQUAL"
        write_line(f"{report.tensors_compared} tensors after {steps} steps: {equal}")
    raise typer.Exit(int(not report.bitwise_equal))
