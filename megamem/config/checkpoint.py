"""The configuration of checkpoints: when they are saved, which are kept, and where a run starts from."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt

from megamem.config.base import ConfigModel


class CheckpointConfig(ConfigModel):
    """Where and when checkpoints are saved, and which are kept.

    One is always saved when a run ends or is stopped.
    """

    folder: Annotated[str, Field(min_length=1)] | None = None
    """Folder, or URL of an object store (`s3://bucket/prefix`, `gs://`, any that fsspec knows), in which a folder with
    the run's name holds its checkpoints; `checkpoints/` in the run folder if not given."""
    retry_minutes: Annotated[float, Field(ge=0)] = 5.0
    """Minutes for which a save tries again where an object store does not answer; training goes on meanwhile."""
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
