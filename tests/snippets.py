"""Code in the documents, taken out of them to be run."""

from __future__ import annotations

import re
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(str(path.relative_to(ROOT)) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")))


class Snippet(NamedTuple):
    """A fenced block of a page."""

    line: int
    """Of the page, from 1."""
    text: str


def snippets(page: str, language: str) -> list[Snippet]:
    """The page's blocks of a language, top to bottom; page: a path from the repository's root."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, flags=re.S | re.M)
    return [Snippet(text.count("\n", 0, match.start(1)) + 1, match[1]) for match in found]


def python_snippets(page: str) -> list[CodeType]:
    """The page's Python blocks, compiled; tracebacks name page and line."""
    found = snippets(page, "python")
    assert found, f"{page} has no Python"
    return [compile("\n" * (line - 1) + text, page, "exec", dont_inherit=True) for line, text in found]


def run_snippets(page: str) -> dict[str, Any]:
    """Run all Python blocks of a page, top to bottom as one program; the names that it leaves."""
    names: dict[str, Any] = {"__name__": "snippets"}
    for code in python_snippets(page):
        exec(code, names)
    return names
