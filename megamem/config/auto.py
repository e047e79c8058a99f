"""Fields of a run that are given as `auto`: the planner chooses them for the devices that the run gets.

A validated configuration holds numbers everywhere. Where `auto` was given these are defaults, which divide every model
and batch, until `megamem.planning.auto.resolve_auto` puts the chosen ones in their place; the section `auto` says which
fields these are, and for how many devices they were chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from pydantic import PositiveInt

from megamem.config.base import ConfigModel

AUTO = "auto"
PARALLEL = "parallel"
"""The section that may itself be given as `auto`."""
AutoField = Literal[
    "parallel.tp",
    "parallel.pp",
    "parallel.zero_stage",
    "training.micro_batch_size",
    "training.recompute",
    "training.window_order",
]
AUTO_FIELDS: tuple[AutoField, ...] = get_args(AutoField)


class AutoConfig(ConfigModel):
    """Fields that were given as `auto`. Nobody needs to write this section: it follows from the values, and a run's
    own config.yaml holds it beside the numbers that were chosen."""

    fields: tuple[AutoField, ...] = ()
    """The fields. On another number of devices they are chosen anew."""
    devices: PositiveInt | None = None
    """Number of devices that the values were chosen for; nothing is chosen yet if not given."""


def spelled_out(section: str, value: Any) -> Any:
    """Return the value of a section; `parallel: auto` as a mapping, so that other keys can join it."""
    if section == PARALLEL and value == AUTO:
        return {path.partition(".")[2]: AUTO for path in AUTO_FIELDS if path.startswith(f"{PARALLEL}.")}
    return value


def noted(tree: object) -> object:
    """Return the mapping of a run without values `auto`; its section `auto` names their fields instead.

    Raises: ValueError where the layers of each stage are given, but the number of stages is not.
    """
    if not isinstance(tree, Mapping):
        return tree
    sections = {name: spelled_out(name, value) for name, value in tree.items()}
    found = []
    for path in AUTO_FIELDS:
        name, _, key = path.partition(".")
        section = sections.get(name)
        if isinstance(section, Mapping) and section.get(key) == AUTO:
            found.append(path)
            sections[name] = {other: value for other, value in section.items() if other != key}
    if not found:
        return sections
    if "parallel.pp" in found and isinstance(placement := sections[PARALLEL].get("placement"), list | tuple):
        raise ValueError(
            f"parallel.placement {list(placement)} gives the layers of each stage, but parallel.pp is auto; give a "
            "number of stages, or a rule as placement"
        )
    known = _fields(sections)
    return {**sections, AUTO: {"fields": [path for path in AUTO_FIELDS if path in known or path in found]}}


def without_auto(tree: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the mapping of a run whose field at `path` is given by hand, though its section `auto` may name it."""
    fields = _fields(tree)
    if path not in fields:
        return tree
    return {**tree, AUTO: {**tree[AUTO], "fields": [field for field in fields if field != path]}}


def value_at(config: ConfigModel, field: AutoField) -> int | str:
    """Return the value of a field of a run."""
    section, _, name = field.partition(".")
    value: int | str = getattr(getattr(config, section), name)
    return value


def _fields(tree: Mapping[str, Any]) -> Sequence[str]:
    """Return the fields that the section `auto` of a run's mapping names, which is not validated yet."""
    section = tree.get(AUTO)
    fields = section.get("fields") if isinstance(section, Mapping) else None
    return fields if isinstance(fields, list | tuple) else ()
