"""Arguments and options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RecipePath = Annotated[Path, typer.Argument(help="YAML file of the run")]
ModelFile = Annotated[
    Path | None, typer.Option("--model", help="YAML file of the model, which also names the run (configs/models)")
]
Overrides = Annotated[list[str] | None, typer.Argument(help="overrides: section.key=value")]
Json = Annotated[bool, typer.Option("--json", help="machine-readable")]
