"""The base class of every configuration model."""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError, PydanticKnownError

_CREDENTIALS = re.compile(
    r"[a-z0-9+.-]:/{1,2}[^/\s?#]*@|:/.*[?&][^=&]*(signature|credential|token|passw|secret|key|\bsig)[^=&]*=",
    re.IGNORECASE,
)
"""A user name, or a signature of one, in a URL."""
_LEAVE_THEM = "has credentials in its URL; leave them to the environment, where the store's library looks"


class ConfigModel(BaseModel):
    """A frozen configuration section. Unknown keys are refused; the docstring under a field is its help text
    (`megamem.config.help_texts`).

    Numbers are finite, and true or false is none. Paths have no line breaks, URLs no credentials.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, protected_namespaces=(), allow_inf_nan=False,
    )  # fmt: skip

    @field_validator("*")
    @classmethod
    def _fit_to_be_written_down(cls, value: object) -> object:
        """Refuse control characters in paths, which go into scripts, and credentials in URLs: all of it is kept."""
        for text in _texts(value):
            if isinstance(text, Path) and re.search(r"[\x00-\x1f\x7f]", str(text)):
                raise ValueError(f"{str(text)!r} has a line break or another control character; use a path without")
            if _CREDENTIALS.search(str(text)):
                raise PydanticCustomError("credentials", _LEAVE_THEM)
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _not_true_for_1(cls, value: object, info: ValidationInfo) -> object:
        """Refuse true and false where a number belongs; Python takes them for 1 and 0."""
        assert info.field_name is not None
        types = _types_in(cls, info.field_name)
        if bool not in types and not types.isdisjoint((int, float)) and _holds_truth(value):
            raise PydanticKnownError("int_type" if int in types else "float_type")
        return value


@cache
def _types_in(model: type[BaseModel], field: str) -> frozenset[object]:
    """Return the types that a field's type is made of."""

    def parts(annotation: Any) -> Iterator[object]:
        arguments = get_args(annotation)
        if not arguments:
            yield annotation
        for argument in arguments:
            yield from parts(argument)

    found = parts(model.__pydantic_fields__[field].annotation)
    return frozenset(part if isinstance(part, type) else type(part) for part in found)  # of a Literal, its values'


def _texts(value: object) -> Iterator[str | Path]:
    """Yield the texts and paths in a value, in its lists and mappings too; other sections have looked at theirs."""
    if isinstance(value, str | Path):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item)


def _holds_truth(value: object) -> bool:
    """Return whether a value is true or false, or holds either in its lists and mappings."""
    if isinstance(value, Mapping):
        return any(map(_holds_truth, value.values()))
    return isinstance(value, bool) or (isinstance(value, list | tuple) and any(map(_holds_truth, value)))
