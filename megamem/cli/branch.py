"""`megamem branch`: a new run that begins with a checkpoint of another and decays from there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megamem.cli.options import Json, Overrides
from megamem.cli.output import write_json, write_line


def branch(
    run: Annotated[Path, typer.Argument(help="folder of a run with optimizer.schedule=wsd; it is only read")],
    at: Annotated[int, typer.Option(min=1, help="step of a checkpoint, where the decay begins")],
    overrides: Overrides = None,
    steps: Annotated[int | None, typer.Option(min=1, help="steps of the new run, those before --at included")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="the same as a budget of tokens of its data")] = None,
    name: Annotated[str | None, typer.Option(help="name of the new run; RUN-STEPS if not given")] = None,
    as_json: Json = False,
) -> None:
    """Make a run that goes on from a checkpoint of a stable run and decays. `megamem train` trains it."""
    from megamem.config.load import load_config
    from megamem.config.run import RunConfig
    from megamem.errors import ConfigError
    from megamem.runs.branch import make_branch
    from megamem.training.checks import data_identity, steps_of

    if tokens is not None:
        if steps is not None:
            raise ConfigError("branch: give either --steps or --tokens")
        steps = steps_of(load_config(RunConfig, run / "config.yaml", overrides or []), tokens)
    config = make_branch(run, at, steps=steps, name=name, overrides=overrides or [], data_identity=data_identity)
    path = config.run_folder / "config.yaml"
    if as_json:
        write_json({"config": str(path), "at": at, "steps": config.steps})
        return
    write_line(f"{path}: goes on after step {at} of {run} and decays to its end, step {config.steps}")
    write_line(f"megamem train {path}")
