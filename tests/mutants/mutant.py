"""The lists of mutants: one YAML file for each area, beside this file.

A mutant is one slip that a programmer could make, as a piece of text in one file and what stands there instead. It is
*killed* when a test fails with it, and *survives* when none does: then something that the product promises is not
tested.
"""

from __future__ import annotations

import ast
import shlex
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
LISTS = sorted(Path(__file__).parent.glob("*.yaml"))


@dataclass(frozen=True)
class Mutant:
    """One mutation of one file, and the tests that must notice it."""

    area: str
    """The name of its list."""
    name: str
    file: str
    """The mutated file, from the root of the repository."""
    old: str
    """Text that stands in the file exactly once."""
    new: str
    """What the mutation puts there."""
    breaks: str
    """What goes wrong for a user, in one line."""
    tests: str
    """The nearest tests, as arguments of pytest."""
    cases: str = ""
    """The contract cases on which laws run (MEGAMEM_CASES)."""

    @property
    def title(self) -> str:
        return f"{self.area}/{self.name}"

    @property
    def arguments(self) -> list[str]:
        return shlex.split(self.tests)

    def applied(self, text: str) -> str:
        """Return the file's text with the mutation; ValueError unless the old text is there exactly once."""
        found = text.count(self.old)
        if found != 1:
            raise ValueError(
                f"{self.title}: `{self.old}` stands {found} times in {self.file}, and must stand there once"
            )
        return text.replace(self.old, self.new)

    def check(self, root: Path) -> None:
        """Raise a ValueError if the mutation cannot be made or its tests are not there."""
        mutated = self.applied((root / self.file).read_text(encoding="utf-8"))
        if self.old == self.new:
            raise ValueError(f"{self.title}: the new text is the old one")
        if self.file.endswith(".py"):
            ast.parse(mutated, self.file)  # a mutant that is no Python would be killed by any test
        for argument in self.arguments:
            path, *names = argument.split("[")[0].split("::")
            if not path.startswith("tests/"):
                continue
            if not (root / path).is_file():
                raise ValueError(f"{self.title}: there is no file {path}")
            source = (root / path).read_text(encoding="utf-8")
            missing = [name for name in names if f"def {name}(" not in source and f"class {name}" not in source]
            if missing:
                raise ValueError(f"{self.title}: {path} has no {', '.join(missing)}")


def read_lists(lists: list[Path] = LISTS) -> list[Mutant]:
    """Return the mutants of all lists, in their order."""
    return [
        Mutant(area=path.stem, **entry) for path in lists for entry in yaml.safe_load(path.read_text(encoding="utf-8"))
    ]
