"""Code in the documents: every block of Python is run by a test, every block of YAML is a valid configuration."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from megamem.config.curriculum import load_runs
from megamem.config.recipe import load_run
from megamem.data.tasks.store import read_task
from megamem.errors import MegamemError
from megamem.study.grid import load_study, planned_runs
from tests.snippets import PAGES, ROOT, Snippet, python_snippets, run_snippets, snippets

RUN_BY = {
    "README.md": "tests/integration/test_readme.py",
    "docs/add_a_mechanism.md": "tests/unit/test_add_a_mechanism.py",
    "docs/evaluation.md": "tests/integration/test_models.py",
    "docs/huggingface.md": "tests/integration/test_models.py",
    "docs/launching.md": "tests/unit/test_launch.py",
    "docs/library.md": "tests/integration/test_models.py",
    "docs/tasks.md": "tests/unit/test_tasks.py",
    "docs/watching.md": "tests/unit/test_extensions.py",
}
"""Which test runs the Python of a page: all its blocks, with what they need around them."""
LANGUAGES = {"", "bash", "python", "toml", "yaml"}


@pytest.mark.parametrize("page", PAGES)
def test_fences_are_of_known_languages(page: str) -> None:
    """No block escapes by another spelling of its language, or by being indented."""
    fences = re.findall(r"^\s*```(.*)$", (ROOT / page).read_text(encoding="utf-8"), flags=re.M)
    opening, closing = fences[::2], fences[1::2]
    assert set(opening) <= LANGUAGES
    assert closing == [""] * len(opening)
    for language in ("python", "yaml"):
        assert len(snippets(page, language)) == opening.count(language)


def test_python_of_every_page_is_run() -> None:
    """The test that the table names asks for the page's blocks by its name; both ways of asking give all of them."""
    assert {page for page in PAGES if snippets(page, "python")} == RUN_BY.keys()
    ways = {run_snippets.__name__, python_snippets.__name__}
    for page, test in RUN_BY.items():
        asked = {
            node.args[0].value
            for node in ast.walk(ast.parse((ROOT / test).read_text(encoding="utf-8")))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ways
            if isinstance(node.args[0], ast.Constant)
        }
        assert page in asked, f"{test} does not run {page}"


def configurations() -> Iterator[object]:
    """Each YAML block, and once more with each key that it shows behind a comment sign, instead of one of its name."""
    for page in PAGES:
        for snippet in snippets(page, "yaml"):
            yield pytest.param(snippet, id=f"{page}:{snippet.line}")
            lines = snippet.text.splitlines(keepends=True)
            for index, line in enumerate(lines):
                if re.match(r"\s*# \w+: ", line):
                    key = line.replace("# ", "", 1)
                    name = key[: key.index(":") + 1]
                    shown = [key if other == line else other for other in lines if not other.startswith(name)]
                    yield pytest.param(Snippet(snippet.line, "".join(shown)), id=f"{page}:{snippet.line + index}")


@pytest.mark.parametrize("snippet", configurations())
def test_yaml_is_a_valid_configuration(snippet: Snippet, tmp_path: Path) -> None:
    load_snippet(snippet.text, tmp_path)


def load_snippet(text: str, folder: Path) -> None:
    """Load a task, a study or sections of a run, with what it does not say itself beside it. Raises MegamemError."""
    path, tree = folder / "snippet.yaml", yaml.safe_load(text)
    path.write_text(text)
    length = tree.get("data", {}).get("sequence_length", 4096)
    model = {"layers": 12, "hidden_size": 256, "heads": 4, "vocab_size": 512, "chunk_size": min(length, 2048)}
    recipe = {
        "name": "run",
        "data": {"sources": ["runs/shards/train"], "sequence_length": length},
        "training": {"steps": 400, "batch_tokens": length},
    }
    (folder / "smol").mkdir()
    contents = {"recipe": recipe, "MODEL": {"model": model}, "small": {**recipe, "model": model}}
    contents["smol/model"] = contents["MODEL"]
    for name, content in contents.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))
    if "kind" in tree:
        read_task(path)
    elif {"axes", "laws"} & tree.keys():
        axes = {"memory": {"none": {}, "melodi": {}}, "model": {"elastic": {}, "melodi": {}}}
        (folder / "study.yaml").write_text(yaml.safe_dump({"name": "study", "run": "small.yaml", "axes": axes}))
        path.write_text(yaml.safe_dump({"base": "study.yaml"}) + text)
        assert planned_runs(load_study(path))
    elif "lessons" in tree:
        path.write_text(yaml.safe_dump({"base": "small.yaml"}) + text)
        assert load_runs(path)
    elif "base" in tree:
        load_run(path, [], None)
    else:
        path.write_text(yaml.safe_dump({"base": "small.yaml"}) + text)
        load_run(path, [], None)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("model: {mixer: {kind: retnet, expand: 2}}", "expand: unknown key"),
        ("model: {mixer: retina}", "retnet"),
        ("axes: {width: {wide: {model.hidden: 4}}}", "hidden: unknown key"),
        ("kind: mqar\npair: 4", "pair: unknown key"),
    ],
)
def test_a_wrong_key_or_value_is_found(text: str, line: str, tmp_path: Path) -> None:
    with pytest.raises(MegamemError, match=line):
        load_snippet(text, tmp_path)
