"""The configuration of what is written while training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from megamem.config.base import ConfigModel
from megamem.config.extensions import AnySink


class WandbConfig(ConfigModel):
    """What is written for Weights & Biases."""

    mode: Literal["offline", "online", "disabled"] = "offline"
    """`offline` writes the run to disk; `megamem wandb sync` uploads it later."""
    project: str = "megamem"
    """Name of the project."""
    group: str | None = None
    """Group of runs; a study's runs have its name if not given."""
    tags: tuple[Annotated[str, Field(min_length=1, max_length=64)], ...] = ()
    """Tags of the run; a study's runs also have their labels, `axis:value`."""


class LoggingConfig(ConfigModel):
    """What is written while training. metrics.jsonl in the run folder always is."""

    every: PositiveInt = 10
    """Steps between log lines; only there the host waits for the device."""
    wandb: WandbConfig = WandbConfig()
    """Weights & Biases run."""
    tensorboard: bool = False
    """Also write TensorBoard event files to the run folder."""
    sinks: tuple[AnySink, ...] = ()
    """Where else the records of log lines and validations go."""
    profile_steps: tuple[PositiveInt, PositiveInt] | None = None
    """First and last step of a torch.profiler trace, written to the run folder by each rank."""
    record_step: PositiveInt | None = None
    """Step whose actions on each pipeline stage are recorded with their times; `megamem plan --recorded` draws them."""
