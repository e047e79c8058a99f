"""The language of the code: docstrings that say what a thing is or does, shapes of tensors, words with one meaning.

docs/glossary.md has the words. ruff's D401 holds the imperative mood besides.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = sorted(
    path
    for package in ("megamem", "tokenization", "checkpoints", "launchers")
    for path in (ROOT / package).rglob("*.py")
)
PREPOSITION = re.compile(
    r"(Of|By|On|In|For|From|To|With|At|As|Per|Under|Over|Into|Without|After|Before|Between|Among|Through)\b"
)
SHAPE = re.compile(
    r"\[[^\]]*\b(tokens|batch|rows|heads|hidden|width|[A-Z])\b[^\]]*\]|\[[^\]]*\.\.\.[^\]]*\]|scalar|See `"
)
ANY_PER_1000_LINES = 5.0
NOT_OURS = {
    "asking": "scaled_query", "dearest": "slowest", "chief": "is_rank_0", "turned": "rotated", "colour": "color",
    "normalise": "normalize", "initialise": "initialize",
}  # fmt: skip
"""Words that are not the field's, and what is said in their place."""


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def documented(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Line, name and docstring of everything that has one: module, classes, functions, and fields of classes."""
    yield 1, "module", ast.get_docstring(tree) or ""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.lineno, node.name, ast.get_docstring(node) or ""
        if isinstance(node, ast.ClassDef):
            for statement in node.body[1:]:
                if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                    yield statement.lineno, f"a field of {node.name}", str(statement.value.value)


def outer_functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """Functions and methods, those inside other functions left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield node
        elif not isinstance(node, ast.Lambda):
            yield from outer_functions(node)


def takes_tensors(function: ast.FunctionDef) -> bool:
    arguments = [*function.args.args, *function.args.kwonlyargs]
    return any(a.annotation is not None and re.search(r"\bTensor\b", ast.unparse(a.annotation)) for a in arguments)


@pytest.mark.parametrize("path", LIBRARY, ids=name)
def test_no_docstring_opens_with_a_preposition(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [f"{line} {what}: {text[:60]}" for line, what, text in documented(tree) if PREPOSITION.match(text)]
    assert not found


@pytest.mark.parametrize("path", LIBRARY, ids=name)
def test_functions_that_take_tensors_state_their_shapes(path: Path) -> None:
    functions = outer_functions(ast.parse(path.read_text(encoding="utf-8")))
    silent = [
        f"{function.lineno} {function.name}"
        for function in functions
        if takes_tensors(function) and not SHAPE.search(ast.get_docstring(function) or "")
    ]
    assert not silent


@pytest.mark.parametrize("path", LIBRARY, ids=name)
def test_words_are_those_of_the_field(path: Path) -> None:
    text = path.read_text(encoding="utf-8").lower()
    assert not {word: better for word, better in NOT_OURS.items() if re.search(rf"\b{word}\b", text)}


def test_any_is_rare() -> None:
    """Of the whole library; imports of the name are not uses."""
    lines = [line for path in LIBRARY for line in path.read_text(encoding="utf-8").splitlines()]
    uses = sum(len(re.findall(r"\bAny\b", line)) for line in lines if not line.startswith("from typing"))
    assert uses / len(lines) * 1000 <= ANY_PER_1000_LINES
