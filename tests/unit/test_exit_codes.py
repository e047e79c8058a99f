"""docs/exit_codes.md lists every error class with its code."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from megamem import errors
from megamem.errors import FINAL, STOPPED, MegamemError, StoppedError

ROOT = Path(__file__).resolve().parents[2]
CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, MegamemError)]


def documented() -> dict[int, str]:
    """First two cells of each row of the table, by code."""
    text = (ROOT / "docs" / "exit_codes.md").read_text(encoding="utf-8")
    return {int(code): classes for code, classes in re.findall(r"^\| (\d+) \|([^|]*)\|", text, re.MULTILINE)}


def test_every_class_is_listed_under_its_code() -> None:
    rows = documented()
    assert len(CLASSES) >= 7
    for cls in CLASSES:
        assert f"`{cls.__name__}`" in rows[cls.exit_code]


def test_nothing_else_is_listed() -> None:
    names = {name for classes in documented().values() for name in re.findall(r"`(\w+)`", classes)}
    assert names == {cls.__name__ for cls in CLASSES}
    assert set(documented()) == {cls.exit_code for cls in CLASSES} | {0, STOPPED}


def test_launchers_try_again_what_the_table_says() -> None:
    """1 may be a defect or a lost rank: it says no for a user, and launchers try it again."""
    text = (ROOT / "docs" / "exit_codes.md").read_text(encoding="utf-8")
    worth = {int(code): word for code, word in re.findall(r"^\| (\d+) \|.*\| (yes|no) \|$", text, re.MULTILINE)}
    assert {code for code, word in worth.items() if word == "no"} - {MegamemError.exit_code} == FINAL
    (again,) = re.findall(r"^  ([\d|]+)\) echo \"try again\"", text, re.MULTILINE)
    assert {int(code) for code in again.split("|")} == {code for code, word in worth.items() if word == "yes"}


def test_codes_tell_conditions_apart() -> None:
    """Siblings have codes of their own, and none collides with those the shell gives to signals.

    Being stopped is no condition: it has one code, whether a rank raises it or not.
    """
    direct = [cls for cls in CLASSES if cls.__base__ is MegamemError and cls is not StoppedError]
    codes = [cls.exit_code for cls in direct]
    assert len(set(codes)) == len(codes)
    assert all(1 < code < 126 for code in [*codes, STOPPED])
    assert STOPPED not in codes
