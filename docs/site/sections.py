"""Docstrings in Google's style: here sections may be one line, and several arguments may share an explanation.

Args:                                       Args:
    heads, width: sizes of the layer.           heads: sizes of the layer.
Returns: the layer.                             width: sizes of the layer.
Raises: ConfigError or DataError by name.
                                            Returns:
                                                the layer.

                                            Raises:
                                                ConfigError: by name.
                                                DataError: by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

HEADERS = "Args|Returns|Raises|Yields"
BORDER = re.compile(rf"\n{{2,}}|\n(?=(?:{HEADERS}):)")
HEADER = re.compile(rf"({HEADERS}):(?: (.+))?", re.DOTALL)
ITEM = re.compile(r"\n(?= {4}\S)")
NAMES = re.compile(r" {4}(\w+(?:, \w+)+): (.+)", re.DOTALL)
ERRORS = re.compile(r"(\w+Error(?:(?:, | or )\w+Error)*)[ :]+(.+)", re.DOTALL)


def with_sections(text: str) -> str:
    """Return a docstring with its sections as Google's style has them."""
    return "\n\n".join(_section(block) for block in BORDER.split(text))


def _section(block: str) -> str:
    """Return a section; other blocks stay as they are, as does `Raises` where it names no error."""
    header, *items = ITEM.split(block)
    match = HEADER.fullmatch(header)
    if match is None:
        return block
    if match[2] is None:
        return "\n".join([header, *(line for item in items for line in _each_name(item))])
    texts = [match[2]]
    if match[1] == "Raises":
        found = [ERRORS.fullmatch(part) for part in re.split(r"; (?=\w+Error\b)", match[2])]
        texts = [f"{name}: {error[2]}" for error in found if error for name in re.split(r", | or ", error[1])]
        if not all(found):
            return block
    return "\n".join([f"{match[1]}:", *(f"    {text}".replace("\n", "\n      ") for text in texts)])


def _each_name(item: str) -> Iterator[str]:
    """Yield an item of `Args` for each argument that it explains."""
    match = NAMES.fullmatch(item)
    if match is None:
        yield item
    else:
        yield from (f"    {name}: {match[2]}" for name in match[1].split(", "))
