"""Callbacks and sinks that a run adds to the built-in ones, named in its configuration by their `kind`.

Each is a configuration class with the fields of that kind and a method `build`. Other packages bring theirs through
the entry-point groups `megamem.callbacks` and `megamem.sinks`.
"""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import BeforeValidator, SerializeAsAny

from megamem.config.base import ConfigModel
from megamem.config.registry import Registry

if TYPE_CHECKING:
    from megamem.runs.sinks.base import Sink


class CallbackConfig(ConfigModel):
    """Something that happens around training steps. Subclasses add their own fields."""

    kind: str
    """Name of the callback."""

    @abstractmethod
    def build(self) -> object:
        """Return the `megamem.training.loop.Callback`. Every rank builds its own."""


class SinkConfig(ConfigModel):
    """Somewhere that metrics go. Subclasses add their own fields."""

    kind: str
    """Name of the sink."""

    @abstractmethod
    def build(self, folder: Path, step: int) -> Sink:
        """Return the sink, on rank 0.

        Args:
            folder: the run's folder, which holds its `config.yaml`.
            step: the step the run resumes from, 0 for a new run; what was written for later steps is made again.
        """


CALLBACKS: Registry[CallbackConfig] = Registry("callback", "megamem.training.callbacks", "megamem.callbacks")
"""Every callback that a configuration can name. A new one registers its configuration with `@CALLBACKS.register`."""
SINKS: Registry[SinkConfig] = Registry("sink", "megamem.runs.sinks", "megamem.sinks")
"""Every sink that a configuration can name. A new one registers its configuration with `@SINKS.register`."""

AnyCallback = Annotated[SerializeAsAny[CallbackConfig], BeforeValidator(CALLBACKS.parse)]
AnySink = Annotated[SerializeAsAny[SinkConfig], BeforeValidator(SINKS.parse)]
