"""Registries of what a configuration names by its `kind` (mixers, architectures, objectives, tasks, ...).

Each is a table of configuration classes. A class of this package registers itself when its module is imported; a
class of another package takes part through an entry-point group, whose entries name modules to import:

    [project.entry-points."megamem.mixers"]
    my_memory = "my_package.my_memory"
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.metadata
import pkgutil
from collections.abc import Mapping
from typing import Generic, TypeVar

from megamem.config.base import ConfigModel
from megamem.errors import ConfigError

C = TypeVar("C", bound=ConfigModel)
T = TypeVar("T", bound=type[ConfigModel])


class Registry(Generic[C]):
    """The configuration classes of one noun (mixer, architecture, ...) by the default of their `kind` field."""

    def __init__(self, noun: str, package: str, entry_points: str) -> None:
        """Describe where classes are registered; nothing is imported before one is looked up.

        Args:
            noun: what error messages call one of them.
            package: package whose modules, in its subpackages too, register the built-in ones.
            entry_points: entry-point group of those that other packages bring.
        """
        self.noun, self.package, self.entry_points = noun, package, entry_points
        self._known: dict[str, type[C]] = {}

    def register(self, config: T) -> T:
        """Make a configuration class known; a class decorator. Raises ValueError where its kind is taken."""
        kind = config.__pydantic_fields__["kind"].default
        if kind in self._known and self._known[kind].__qualname__ != config.__qualname__:
            raise ValueError(f"two {self.noun}s are called {kind!r}: {self._known[kind]} and {config}")
        self._known[kind] = config  # type: ignore[assignment]
        return config

    @functools.cached_property
    def _discovered(self) -> bool:
        """True once every module that registers a class is imported."""
        import_all(self.package)
        for entry in importlib.metadata.entry_points(group=self.entry_points):
            entry.load()
        return True

    def kinds(self) -> dict[str, type[C]]:
        """Return all registered classes by `kind`, sorted."""
        assert self._discovered
        return dict(sorted(self._known.items()))

    def find(self, kind: str) -> type[C]:
        """Return the class of `kind`. Raises ConfigError naming the nearest valid kind."""
        kinds = self.kinds()
        if kind in kinds:
            return kinds[kind]
        near = difflib.get_close_matches(kind, kinds, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ";"
        raise ConfigError(f"kind: {kind!r} is no {self.noun}{hint} valid: {', '.join(kinds)}")

    def parse(self, value: object) -> object:
        """Turn a kind, or a mapping with one, into its configuration; for pydantic's `BeforeValidator`.

        Raises: ValueError naming what is missing or not known.
        """
        if isinstance(value, str):
            value = {"kind": value}
        if isinstance(value, Mapping):
            if "kind" not in value:
                raise ValueError(f"a {self.noun} needs a `kind`; got the keys {sorted(map(str, value))}")
            try:
                config_type = self.find(str(value["kind"]))
            except ConfigError as error:
                raise ValueError(str(error)) from None
            return config_type.model_validate(dict(value))
        return value


def import_all(package: str) -> None:
    """Import every module of a package and of its subpackages."""
    root = importlib.import_module(package)
    for module in pkgutil.walk_packages(root.__path__, f"{package}."):
        importlib.import_module(module.name)
