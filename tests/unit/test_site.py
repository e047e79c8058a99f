"""The site of the documentation: links, docstrings and the reference. `make site` builds it and ends at a warning."""

import importlib
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from docs.site.links import site_links
from docs.site.reference import REFERENCE, reference_page
from docs.site.sections import with_sections

ROOT = Path(__file__).resolve().parents[2]
SITE = (ROOT / "mkdocs.yml").read_text()


@pytest.mark.parametrize(
    ("uri", "before", "after"),
    [
        ("index.md", "[data](docs/data.md#order)", "[data](data.md#order)"),
        ("index.md", "[license](LICENSE)", "[license](license.md)"),
        ("index.md", "![x](docs/pictures/mqar.png)", "![x](pictures/mqar.png)"),
        ("mechanisms/dla.md", "[deep](deep.md), [all](../recipes.md)", "[deep](deep.md), [all](../recipes.md)"),
        ("library.md", "[start](../README.md), [here](#a)", "[start](index.md), [here](#a)"),
        ("contributing.md", "[words](docs/glossary.md)", "[words](glossary.md)"),
        ("data.md", "[out](https://example.org/docs/a.md)", "[out](https://example.org/docs/a.md)"),
        (
            "mechanisms/dla.md",
            "`megamem/memory/base.py`, `megamem/cli/main.py`",
            "[`megamem/memory/base.py`](../reference/mechanisms.md#megamem.memory.base), `megamem/cli/main.py`",
        ),
        ("data.md", "```\n[a](docs/b.md)\n```", "```\n[a](docs/b.md)\n```"),
    ],
)
def test_links_lead_to_where_things_stand(uri, before, after):
    assert site_links(before, uri) == after


def test_docstrings_have_sections_that_griffe_reads():
    written = """Read it.

Args:
    heads, width: sizes
        of the layer.
    seed: a number.
Returns: the layer,
which is new.
Raises: ConfigError or DataError by name; ValueError where it
makes no sense."""
    assert (
        with_sections(written)
        == """Read it.

Args:
    heads: sizes
        of the layer.
    width: sizes
        of the layer.
    seed: a number.

Returns:
    the layer,
      which is new.

Raises:
    ConfigError: by name
    DataError: by name
    ValueError: where it
      makes no sense."""
    )


@pytest.mark.parametrize("text", ["Do it.", "Do it.\n\nRaises: see `call`.", "Do it: now.\n\n    code\n\nMore."])
def test_other_docstrings_stay_as_they_are(text):
    assert with_sections(text) == text


def test_the_reference_is_of_modules_that_exist_each_on_one_page():
    modules = [module for page in REFERENCE.values() for module in page.modules]
    assert len(modules) == len(set(modules))
    for module in modules:
        assert importlib.import_module(module).__doc__, module
    for uri, page in REFERENCE.items():
        assert f": {uri}\n" in SITE, f"{uri} is not in the navigation"
        assert [line[4:] for line in reference_page(page).split("\n") if line.startswith("::: ")] == list(page.modules)


def test_every_page_of_the_readme_s_table_is_in_the_navigation():
    readme = (ROOT / "README.md").read_text()
    for page in re.findall(r"\]\(docs/([\w/]+\.md)", readme):
        assert re.search(rf": {page}$", SITE, re.MULTILINE), page


def test_what_builds_the_site_is_pinned_in_range():
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["docs"]
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    for requirement in map(Requirement, extra):
        assert requirement.specifier.contains(pins[requirement.name]), requirement.name


def test_continuous_integration_builds_it():
    assert "\nmake site\n" in (ROOT / ".ci" / "run").read_text()
    # with --quiet mkdocs would not count warnings
    target = r"^site: .*\n(?:\t.*\n)*\t.* mkdocs build --strict$"
    assert re.search(target, (ROOT / "Makefile").read_text(), re.MULTILINE)
