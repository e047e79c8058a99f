"""The documents point at things that exist: files, make targets, verbs, configuration keys."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from megamem.cli.main import app
from megamem.study.grid import load_study, planned_runs

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def page_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http:", "https:")):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_anchors_are_headings(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http:", "https:")):
            there = (page.parent / target if target else page).read_text(encoding="utf-8")
            headings = re.findall(r"^#+ (.+)$", there, re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in headings}, anchor


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_tables_are_whole(page: Path) -> None:
    """Rows that an empty line parts from their head are shown as text with bars."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for rows in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        assert re.match(r"\|[^\n]*\n\|[ :|-]+\|", rows), rows.partition("\n")[0]


def test_studies_are_listed_with_their_runs() -> None:
    listed = re.findall(
        r"^\| `(configs/studies/\S+)` \|.*\| (\d+)[^|]*\|$", (ROOT / "docs/studies.md").read_text(), re.M
    )
    assert len(listed) > 10
    for path, runs in listed:
        assert len(planned_runs(load_study(ROOT / path))) == int(runs), path


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_named_paths_exist(page: Path) -> None:
    pattern = r"`((?:megamem|tokenization|checkpoints|launchers|tests|configs|docs|benchmarks)/[\w./-]*)"
    for path in re.findall(pattern, page.read_text(encoding="utf-8")):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_make_targets_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for command in re.findall(r"(?:^|`)make ([a-z -]+)", text, re.MULTILINE):
        assert set(command.split("  ")[0].split()) <= TARGETS, command


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_verbs_exist(page: Path) -> None:
    root = typer.main.get_command(app)
    for line in re.findall(r"(?:^|`|: )megamem ([a-z][^`\n]*)", page.read_text(encoding="utf-8"), re.MULTILINE):
        group, verb = root, line.split()
        while verb and isinstance(getattr(group, "commands", None), dict):
            assert verb[0] in group.commands, f"megamem {line}"
            group = group.commands[verb.pop(0)]


def test_every_target_is_explained_and_phony() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = set(re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE).group(1).split())
    assert phony == TARGETS
    assert {"install", "demo", "test", "test-full", "lint", "bench", "bench-gpu", "clean", "docs"} <= TARGETS
    for target in TARGETS:
        assert re.search(rf"^{target}:.*## \w", makefile, re.MULTILINE), target


def test_constraints_pin_every_dependency_in_range() -> None:
    import importlib.metadata

    from packaging.requirements import Requirement

    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    for line in importlib.metadata.requires("megamem") or []:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": "dev"}):
            name = requirement.name.lower()
            assert name in pins, f"{name} is not pinned in constraints.txt"
            assert requirement.specifier.contains(pins[name]), f"{name}: {pins[name]} is outside of pyproject's range"


def test_ci_command_is_the_readme_s() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert {"make test", "make lint"} <= set(script.read_text().splitlines())
    assert "make test " in (ROOT / "README.md").read_text()
