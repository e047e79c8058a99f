"""The interface of synthetic tasks: a configuration with a `kind`, and a maker of examples.

A new task is one file in this package; other packages bring theirs through the entry-point group `megamem.tasks`.
docs/tasks.md shows one.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Protocol

import numpy as np
from pydantic import Field, PositiveInt

from megamem.config.base import ConfigModel
from megamem.config.registry import Registry
from megamem.data.store import Int64


class Task(Protocol):
    """Makes examples."""

    @property
    def fingerprint(self) -> str:
        """What examples are made of besides the configuration, in a text that changes with it."""

    @property
    def vocab_size(self) -> int:
        """Bound of the token ids."""

    @property
    def tokenizer_hash(self) -> str | None:
        """SHA-256 of the tokenizer's file, if there is one."""

    def make(self, generator: np.random.Generator) -> tuple[Int64, Int64]:
        """Return tokens and labels of one example, both [length], or as many as `TaskConfig.lengths` says.

        `labels[t]` is to be predicted after `tokens[t]`; `IGNORED` where nothing is.

        generator: the example's own; a task draws from nothing else.
        """


class TaskConfig(ConfigModel):
    """A task's description, as a YAML file gives it. Subclasses add their own fields."""

    kind: str
    """Name of the task."""
    length: PositiveInt = 256
    """Tokens of an example; of the longest one where they differ."""
    examples: PositiveInt = 100_000
    """Examples of an epoch."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the examples."""

    def generator(self, example: int) -> np.random.Generator:
        """Return the generator of an example: all that is random in it comes from seed and number."""
        return np.random.default_rng((self.seed, example))

    def lengths(self) -> Int64:
        """Return the tokens of every example, [examples]: `length`, unless a task makes shorter ones too."""
        return np.full(self.examples, self.length)

    @abstractmethod
    def open(self) -> Task:
        """Return the maker of examples. Raises DataError where something it is made of is missing or does not fit."""


TASKS: Registry[TaskConfig] = Registry("task", "megamem.data.tasks", "megamem.tasks")
"""Every task there is. A new one registers its configuration with `@TASKS.register`."""
