"""What was reproduced of the papers: the page is the file's, complete, and says what the pages say that it links to."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.reproduction import MEANINGS, RECORD, Item, Paper, Record, main
from megamem.config.curriculum import load_runs
from megamem.config.load import load_config, parse_config, read_yaml
from megamem.config.recipe import load_run
from megamem.errors import ConfigError
from megamem.study.grid import load_study
from tests.unit import test_docs as docs

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reproduction.md"
PAPERS = load_config(Record, RECORD).papers
IN_THE_PAPERS = {
    "Elastic Memory": [
        "Table 1", "Table 2", "Table 3", "Table 4", "Table 5", "Table 6", "Table 7", "Table 8", "Table 9", "Table 10",
        "Table 11", "Table 12", "Table 13",
    ],
    "infinity-former": [
        "Table 1", "Table 2", "Figure 1", "Figure 2", "Figure 3", "Figure 4", "Figure 5", "Figure 6", "Figure 7",
        "Figure 8", "Figure 9",
    ],
    "LaMemo": [
        "Table 1", "Table 2", "Table 3", "Table 4", "Table 5", "Table 6", "Table 7", "Figure 1", "Figure 2", "Figure 3",
        "Figure 4", "Figure 5", "Figure 6", "Figure 7", "Figure 8",
    ],
    "Memory models": [
        "Table 1", "Table 2", "Table 3", "Table 4", "Table S1", "Table S2", "Figure 1", "Figure 2", "Figure 3",
        "Figure 4", "Figure S1", "Figure S2", "Figure S3", "Figure S4", "Figure S5", "Figure S6", "Figure S7",
        "Figure S8", "Figure S9",
    ],
    "Memory Caching": [
        "Table 1", "Table 2", "Table 3", "Table 4", "Table 5", "Figure 1", "Figure 2", "Figure 3", "Figure 4",
        "Figure 5",
    ],
}  # fmt: skip
"""Every table and figure, appendices included, in the order of the page; Elastic Memory has no figures."""


def items(*, command: bool = False) -> Iterator[object]:
    """All items with their papers, or those that have a command."""
    for paper in PAPERS:
        for item in paper.items:
            if item.command or not command:
                yield pytest.param(paper, item, id=f"{paper.name}, {item.item}")


def text_of(item: Item) -> str:
    return " ".join((item.shows, item.here, item.found, item.differs, item.hours))


def test_the_page_is_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    printed = capsys.readouterr().out
    assert PAGE.read_text() == printed, "python -m benchmarks.reproduction > docs/reproduction.md"


def test_every_table_and_figure_is_there() -> None:
    assert {paper.name: [item.item for item in paper.items] for paper in PAPERS} == IN_THE_PAPERS
    rows = re.findall(r"^\| ((?:Table|Figure) \S+) \|", PAGE.read_text(), re.MULTILINE)
    assert rows == [item for listed in IN_THE_PAPERS.values() for item in listed]


def test_counts_are_those_of_the_papers() -> None:
    assert set(MEANINGS) == {item.status for paper in PAPERS for item in paper.items}
    for paper in PAPERS:
        numbers = re.search(rf"^\| \[{paper.name}\]\S+ \| (.*) \|$", PAGE.read_text(), re.MULTILINE).group(1)
        *by_status, every = map(int, numbers.split(" | "))
        assert by_status == [sum(item.status == status for item in paper.items) for status in MEANINGS]
        assert every == sum(by_status) == len(IN_THE_PAPERS[paper.name])


@pytest.mark.parametrize(
    "check",
    [
        docs.test_links_lead_somewhere,
        docs.test_anchors_are_headings,
        docs.test_named_paths_exist,
        docs.test_verbs_exist,
    ],
)
def test_links_anchors_paths_and_verbs(check) -> None:
    check(PAGE)


@pytest.mark.parametrize(("paper", "item"), items())
def test_figures_are_linked_with_their_section(paper: Paper, item: Item) -> None:
    assert item.page.partition("#")[0] != PAGE.name
    assert "#" in item.page or not item.page


@pytest.mark.parametrize(("paper", "item"), items())
def test_cells_stay_cells(paper: Paper, item: Item) -> None:
    assert not re.search(r"[|\n]", text_of(item))


@pytest.mark.parametrize(("paper", "item"), items())
def test_what_it_refers_to_is_there(paper: Paper, item: Item) -> None:
    """Items that are named, such as in `As for Table 2`, are of the same paper and are not the item itself."""
    for kind, first, second in re.findall(r"\b(Table|Figure)s? (S?\d+)(?:,? (?:and|or) (\d+))?", text_of(item)):
        for number in filter(None, (first, second)):
            named = [other for other in paper.items if other.item == f"{kind} {number}"]
            assert named, f"{kind} {number}"
            assert named != [item]


def numbers(text: str) -> set[str]:
    """Numbers as they are written, with a minus that no digit or letter stands before."""
    return set(re.findall(r"(?:(?<![\w.)])-)?\d+(?:,\d{3})*(?:\.\d+)?(?:e-\d+)?", text))


@pytest.mark.parametrize(("paper", "item"), items())
def test_numbers_of_what_was_found_stand_on_the_linked_pages(paper: Paper, item: Item) -> None:
    linked = {item.page, *re.findall(r"\]\(([^)]+)\)", item.found)} - {""}
    pages = [(ROOT / "docs" / link.partition("#")[0]).read_text(encoding="utf-8") for link in linked]
    prose = re.sub(r"\]\([^)]+\)|`[^`]+`|\b(?:Table|Figure)s? S?\d+|S-NIAH-\d", "", item.found)
    assert numbers(prose) <= numbers(" ".join(pages))


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command, comments left out, with variables that earlier lines set in their places."""
    variables: dict[str, str] = {}
    for line in text.replace("\\\n", " ").splitlines():
        for name, value in variables.items():
            line = line.replace(f"${name}", value)
        words = shlex.split(line, comments=True)
        if words and all(re.fullmatch(r"[A-Z]+=.*", word) for word in words):
            variables |= dict(word.split("=", 1) for word in words)
        else:
            yield words


@pytest.mark.parametrize(("paper", "item"), items(command=True))
def test_commands_name_what_exists(paper: Paper, item: Item) -> None:
    for words in commands(item.command):
        for word in words:
            assert not re.match(r"(configs|tests)/", word) or (ROOT / word).is_file(), word
        if words[:2] == ["python", "-m"]:
            assert importlib.util.find_spec(words[2]), words[2]
        else:
            assert words[0] in ("megamem", "for", "done"), words


@pytest.mark.parametrize(("paper", "item"), items(command=True))
def test_trainings_and_studies_are_valid_configurations(paper: Paper, item: Item) -> None:
    for words in commands(item.command):
        if words[:2] == ["megamem", "train"]:
            files = [Path(word) for word in words if word.endswith(".yaml")]
            if "lessons" in read_yaml(files[0]):
                assert load_runs(files[0])
            else:
                assert load_run(files[0], [word for word in words if "=" in word], *files[1:])
        if words[:3] == ["megamem", "study", "run"]:
            assert load_study(Path(words[3]), words[4:])


WHOLE = {
    "item": "Table 1", "shows": "losses", "here": "at small size", "found": "the order", "differs": "the size",
    "page": "data.md#order", "command": "make demo",
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "line"),
    [
        *[({"status": status, key: ""}, f"is '{status}' and has no '{key}'")
          for status in ("reproduced", "smaller") for key in ("here", "found", "differs", "page", "command")],
        ({"status": "configured"}, "'configured' and cannot have 'found'"),
        ({"status": "configured", "here": "", "found": "", "command": ""}, "has no 'command'"),
        ({"status": "configured", "here": "", "found": "", "hours": "3"}, "cannot have 'hours'"),
        ({"status": "not yet"}, "cannot have 'command'"),
        ({"status": "not yet", "here": "", "found": "", "page": "", "command": "", "differs": ""}, "has no 'differs'"),
        ({"status": "drawing"}, "cannot have 'command'"),
        ({"status": "done"}, "status: should be 'reproduced'"),
        ({"status": "smaller", "hour": "3"}, "hour: unknown key; did you mean 'hours'?"),
    ],
)  # fmt: skip
def test_an_item_has_what_its_status_says(change: dict[str, str], line: str) -> None:
    assert parse_config(Item, {**WHOLE, "status": "smaller", "hours": "3"}, "here").was_run
    with pytest.raises(ConfigError, match=re.escape(line)):
        parse_config(Item, {**WHOLE, **change}, "here")
