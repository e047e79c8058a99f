"""The generated page of configuration keys."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field, PositiveInt

from megamem.config.document import _type_name, configuration_markdown
from megamem.config.help_texts import help_texts
from megamem.config.model import MIXERS
from megamem.config.run import RunConfig

ROOT = Path(__file__).resolve().parents[2]


def test_committed_page_is_up_to_date() -> None:
    committed = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert committed == configuration_markdown(), "run `make docs`"


def test_generator_writes_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    subprocess.run([sys.executable, "-m", "megamem.config.document", str(page)], check=True, cwd=ROOT)
    assert page.read_text(encoding="utf-8") == configuration_markdown()


def models(model: type[BaseModel]) -> list[type[BaseModel]]:
    found = [model]
    for field in model.__pydantic_fields__.values():
        text = [field.annotation]
        while text:
            item = text.pop()
            text.extend(getattr(item, "__args__", ()))
            if isinstance(item, type) and issubclass(item, BaseModel):
                found += models(item)
    return found


def test_every_field_has_help_and_a_row() -> None:
    page = configuration_markdown()
    ours = [config for config in MIXERS.kinds().values() if config.__module__.startswith("megamem.")]
    for model in [*models(RunConfig), *ours]:
        texts = help_texts(model)
        for name in model.__pydantic_fields__:
            assert texts.get(name), f"{model.__name__}.{name} has no docstring"
            if name != "kind":
                assert f"| `{name}` |" in page
    for kind in ours:
        assert f"### `{kind.__pydantic_fields__['kind'].default}`" in page


def test_tables_have_four_columns() -> None:
    for line in configuration_markdown().splitlines():
        if line.startswith("|"):
            assert len(re.findall(r"(?<!\\)\|", line)) == 5, line


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (PositiveInt | None, "int > 0"),
        (Annotated[float, Field(ge=0, lt=1)], "number >= 0 and < 1"),
        (tuple[PositiveInt, PositiveInt], "[int > 0, int > 0]"),
        (tuple[str, ...], "list of text"),
        (list[Annotated[int, Field(ge=0)]], "list of int >= 0"),
        (Literal["a", 2], "`a`, `2`"),
        (bool, "true or false"),
        (Path | None, "path"),
    ],
)
def test_types_in_words(annotation: object, words: str) -> None:
    assert _type_name(annotation) == words
