"""The configuration of where a run comes from."""

from __future__ import annotations

from pathlib import Path

from pydantic import PositiveInt

from megamem.config.base import ConfigModel


class OriginConfig(ConfigModel):
    """Where the training of a branch comes from. `megamem branch` writes it."""

    run: Path
    """Folder of the run that the branch was made of."""
    step: PositiveInt
    """Step after which it leaves that run."""
