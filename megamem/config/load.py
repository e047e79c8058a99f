"""Reads YAML files with inheritance and dotted overrides into validated configurations; errors are one line."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from megamem.config.auto import spelled_out
from megamem.config.base import ConfigModel
from megamem.config.extensions import CALLBACKS, SINKS, CallbackConfig, SinkConfig
from megamem.config.model import (
    ARCHITECTURES,
    MIXERS,
    ArchitectureConfig,
    MixerConfig,
)
from megamem.config.objective import OBJECTIVES, ObjectiveConfig
from megamem.config.registry import Registry
from megamem.config.yaml_text import DEEPEST, parse_yaml, to_yaml
from megamem.errors import ConfigError

C = TypeVar("C", bound=ConfigModel)
Tree = dict[str, Any]
"""A mapping as YAML has it."""


_PACKAGE = Path(__file__).resolve().parents[1]


def read_yaml(path: Path) -> Tree:
    """Return the mapping in a YAML file merged over its `base:` files, which are relative to it and merged in order.

    A path below `configs` that is not in the working folder is that of a file which megamem is installed with.

    Raises: ConfigError naming the file that cannot be read, or leads back to itself.
    """
    installed = _PACKAGE / path
    if path.parts[:1] == ("configs",) and not path.exists() and installed.exists():
        path = installed
    return _read(path.resolve(), ())


def _read(path: Path, above: tuple[Path, ...]) -> Tree:
    """Return what `read_yaml` does. above: the files whose base this one is."""
    if path in above:
        raise ConfigError(f"{path}: `base` leads back to the file itself")
    origin = f" (base of {above[-1]})" if above else ""
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError):
        raise ConfigError(f"{path}: no such configuration file{origin}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read{origin}: {error}") from None
    tree = parse_yaml(text, str(path))
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected `key: value` lines, got {type(tree).__name__}")
    bases = tree.pop("base", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ConfigError(f"{path}: base: expected a path or a list of paths, got {bases!r}")
    merged: Tree = {}
    for base in bases:
        merged = merge(merged, _read((path.parent / base).resolve(), (*above, path)))
    return merge(merged, tree)


def merge(below: Tree, above: Tree) -> Tree:
    """Merge `above` over `below`: mappings key by key; all else, and a mapping of another `kind`, is replaced."""
    merged = dict(below)
    for key, given in above.items():
        old, value = spelled_out(key, merged.get(key)), spelled_out(key, given)
        if isinstance(value, dict) and isinstance(old, dict) and value.get("kind", old.get("kind")) == old.get("kind"):
            merged[key] = merge(old, value)
        else:
            merged[key] = value
    return merged


def apply_overrides(tree: Tree, overrides: Iterable[str]) -> Tree:
    """Return `tree` with overrides applied one after the other; see `apply_override`. Raises ConfigError."""
    for override in overrides:
        tree = apply_override(tree, override)
    return tree


def apply_override(tree: Tree, override: str) -> Tree:
    """Return `tree` with `a.b=value` (value in YAML) set.

    A number picks from a list: `model.memory.0.mixer.order=64`. Raises: ConfigError naming the override.
    """
    path, equals, text = override.partition("=")
    if not equals or not path.strip():
        raise ConfigError(f"override {override!r}: expected key.path=value")
    return with_value(tree, path.strip(), parse_yaml(text, f"override {override!r}"))


def with_value(tree: Tree, path: str, value: object) -> Tree:
    """Return `tree` with `value` at a dotted path, in which a number picks from a list. Raises ConfigError."""
    keys = path.split(".")
    if len(keys) > DEEPEST:
        raise ConfigError(f"{path[:40]}...: {len(keys)} keys; a path has at most {DEEPEST}")
    changed = _set(tree, keys, value, path)
    assert isinstance(changed, dict)  # a path has at least one key
    return changed


def _set(node: object, keys: Sequence[str], value: object, path: str) -> object:
    """Return `node` with `value` where `keys` lead; sections that are missing are made."""
    if not keys:
        return value
    key, rest = keys[0], keys[1:]
    if isinstance(node, list):
        if not key.isdecimal() or int(key) >= len(node):
            raise ConfigError(f"{path}: {key!r} is no index of a list of {len(node)}")
        return [_set(item, rest, value, path) if i == int(key) else item for i, item in enumerate(node)]
    if not isinstance(node, dict):
        node = {}
    old = spelled_out(key, node.get(key, {}))
    new = spelled_out(key, value) if not rest else value
    return merge(node, {key: new}) if new is not value else {**node, key: _set(old, rest, value, path)}


def load_config(config_type: type[C], path: Path, overrides: Sequence[str] = ()) -> C:
    """Read, merge, override and validate a file. Raises ConfigError with one line for all problems."""
    return parse_config(config_type, apply_overrides(read_yaml(path), overrides), str(path))


def parse_config(config_type: type[C], tree: Mapping[str, Any], where: str) -> C:
    """Validate a mapping. Raises ConfigError naming `where`, the key, the value and what would be valid."""
    try:
        return config_type.model_validate(dict(tree))
    except ValidationError as error:
        items = error.errors()
        # a list that is too short after its bad entries were left out is no problem of its own
        deeper = [item for item in items if item["type"] != "too_short"] or items
        problems = "; ".join(_explain(config_type, item, tree) for item in deeper)
        raise ConfigError(f"{where}: {problems}") from None


_WORDING = {
    "model_type": "expected a section of keys",
    "tuple_type": "expected a list",
    "list_type": "expected a list",
    "int_type": "expected an integer",
    "int_parsing": "expected an integer",
    "int_from_float": "expected an integer",
    "float_type": "expected a number",
    "float_parsing": "expected a number",
    "bool_type": "expected true or false",
    "bool_parsing": "expected true or false",
    "string_type": "expected text",
    "path_type": "expected a path",
}


def _explain(config_type: type[BaseModel], item: ErrorDetails, tree: object) -> str:
    """Return one of pydantic's errors in words: key, problem, value, and what would be valid."""
    location = [str(part) for part in item["loc"]]
    name = ".".join(location)
    if item["type"] == "extra_forbidden":
        return unknown_key(name, _fields_at(config_type, location[:-1], tree))
    if item["type"] == "missing":
        return f"{name}: required, but not given"
    message = _WORDING.get(item["type"], item["msg"].removeprefix("Value error, ").replace("Input should", "should"))
    if item["type"] == "literal_error":  # as YAML writes them
        message = message.replace("False", "false").replace("True", "true")
    value = item.get("input")
    if item["type"] == "credentials":  # not to be shown
        value = ...
    shown = f" (got {value!r})" if isinstance(value, str | int | float | bool) or value is None else ""
    return f"{name}: {message}{shown}" if name else message


def unknown_key(name: str, valid: Sequence[str]) -> str:
    """Return the message about a key that is not known where it stands. name: dotted, the key last."""
    near = difflib.get_close_matches(name.rpartition(".")[2], valid, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ";"
    return f"{name}: unknown key{hint} valid keys here: {', '.join(valid)}"


def _fields_at(config_type: type[BaseModel], location: Sequence[str], tree: object) -> list[str]:
    """Return the field names of the model that `location` leads to."""
    found = config_type
    for part in location:
        if isinstance(tree, list | tuple) and part.isdigit():
            tree = tree[int(part)]
        else:
            tree = tree.get(part, {}) if isinstance(tree, Mapping) else {}
            models = _models(found.__pydantic_fields__[part].annotation) if part in found.__pydantic_fields__ else []
            if not models:
                break
            found = models[0]
        found = _of_kind(found, tree.get("kind") if isinstance(tree, Mapping) else None)
    return sorted(found.__pydantic_fields__)


def _of_kind(found: type[BaseModel], kind: object) -> type[BaseModel]:
    """Return the class that a `kind` names, where `found` is a class of what a registry holds."""
    registries: dict[type[BaseModel], Registry[Any]] = {
        MixerConfig: MIXERS, ArchitectureConfig: ARCHITECTURES, ObjectiveConfig: OBJECTIVES,
        CallbackConfig: CALLBACKS, SinkConfig: SINKS,
    }  # fmt: skip
    registry = next((registry for base, registry in registries.items() if issubclass(found, base)), None)
    of_kind: type[BaseModel] = registry.kinds().get(str(kind), found) if registry else found
    return of_kind


def _models(annotation: object) -> list[type[BaseModel]]:
    """Return the models in a type, such as that of an optional section."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models(argument)]


def dump_yaml(config: ConfigModel) -> str:
    """Return the resolved configuration as YAML that loads back to an equal one."""
    return to_yaml(config.model_dump(mode="json"))


def config_hash(config: ConfigModel) -> str:
    """Return twelve hexadecimal digits that identify the resolved configuration."""
    canonical = json.dumps(config.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]
