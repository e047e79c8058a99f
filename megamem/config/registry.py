"""Which mixers exist. A mixer's configuration class registers itself under its `kind`.

Mechanisms of other packages take part through the entry-point group `megamem.mixers`: each entry names a module
whose import registers its configurations.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.metadata
from typing import TYPE_CHECKING, TypeVar

from megamem.errors import ConfigError

if TYPE_CHECKING:
    from megamem.config.model import MixerConfig

_MIXERS: dict[str, type[MixerConfig]] = {}
T = TypeVar("T", bound="type[MixerConfig]")


def register_mixer(config: T) -> T:
    """Class decorator: make a `MixerConfig` subclass known under the default of its `kind` field."""
    kind = config.__pydantic_fields__["kind"].default
    if kind in _MIXERS and _MIXERS[kind].__qualname__ != config.__qualname__:
        raise ValueError(f"two mixers are called {kind!r}: {_MIXERS[kind]} and {config}")
    _MIXERS[kind] = config
    return config


@functools.cache
def _discover() -> None:
    importlib.import_module("megamem.memory")
    for entry in importlib.metadata.entry_points(group="megamem.mixers"):
        entry.load()


def mixer_kinds() -> dict[str, type[MixerConfig]]:
    """All registered mixer configurations by `kind`, sorted."""
    _discover()
    return dict(sorted(_MIXERS.items()))


def mixer_config_type(kind: str) -> type[MixerConfig]:
    """The configuration class of `kind`. Raises ConfigError naming the nearest valid kind."""
    kinds = mixer_kinds()
    if kind in kinds:
        return kinds[kind]
    near = difflib.get_close_matches(kind, kinds, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ";"
    raise ConfigError(f"kind: {kind!r} is no mixer{hint} valid: {', '.join(kinds)}")
