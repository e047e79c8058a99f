"""`megamem wandb`: offline runs to Weights & Biases."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megamem.cli.output import write_line

wandb_app = typer.Typer(help="Offline runs to Weights & Biases.", no_args_is_help=True)


@wandb_app.callback()
def _group() -> None:
    """Keep `sync` a verb of its own."""


@wandb_app.command()
def sync(
    runs: Annotated[list[Path], typer.Argument(help="run folders, or folders of studies", metavar="RUN...")],
) -> None:
    """Upload what runs have written offline, with `wandb sync`; what is uploaded already is left out.

    Runs that go on are left for the next time: `wandb sync` may take what they have for all of them.
    """
    from megamem.runs.offline_wandb import sync as upload

    upload(runs, write_line)
