"""The configuration of checkpoints: when they are saved, which are kept, and where a run starts from."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt

from megamem.config.base import ConfigModel


class CheckpointConfig(ConfigModel):
    """When checkpoints are saved and which are kept, under `checkpoints/` in the run folder.

    One is always saved when a run ends or is stopped.
    """

    every: Annotated[int, Field(ge=0)] = 500
    """Steps between checkpoints; 0 saves at the end only."""
    minutes: PositiveFloat | None = None
    """Also save when so many minutes have passed since the last one."""
    keep_last: PositiveInt = 2
    """Number of newest checkpoints that are kept."""
    keep_every: PositiveInt | None = None
    """Also keep those whose step is a multiple of this."""
    keep_steps: tuple[PositiveInt, ...] = ()
    """Also save after each of these steps, and keep those checkpoints: where `megamem branch` can begin."""
    keep_best: Annotated[int, Field(ge=0)] = 0
    """Also keep so many of lowest validation loss (of those saved at a step with a validation)."""
    asynchronous: bool = True
    """Write in the background: a step only waits for a copy in memory. One save at a time."""
    resume: str = "auto"
    """`auto` goes on from the newest checkpoint of the run folder if there is one, `none` never; else the path of a
    checkpoint to go on from."""
    fallback: bool = False
    """Take the newest undamaged checkpoint where the newest one is damaged, and say what was skipped; `auto` only."""
