"""The page that says which tables and figures of the papers were reproduced here, from docs/reproduction.yaml.

    python -m benchmarks.reproduction > docs/reproduction.md

Nothing is run or measured: the file holds what docs/ states elsewhere, and where. A test compares the page with what
this prints, and its numbers with the pages that they come from.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Self, get_args

from pydantic import Field, model_validator

from benchmarks.common import ROOT, table
from megamem.config.base import ConfigModel
from megamem.config.load import load_config

RECORD = ROOT / "docs" / "reproduction.yaml"
Status = Literal["reproduced", "smaller", "configured", "not yet", "drawing"]
MEANINGS: dict[Status, str] = {
    "reproduced": "the paper's own numbers come out",
    "smaller": "run here with smaller models, less text or another machine; the paper's order may or may not be found",
    "configured": "configurations and commands for the paper's size are here; they have not been run",
    "not yet": "neither run nor configured; the table says what it would take",
    "drawing": "explains an architecture: there is nothing to run",
}
NEEDED: dict[Status, frozenset[str]] = {
    "reproduced": frozenset({"here", "found", "differs", "page", "command"}),
    "smaller": frozenset({"here", "found", "differs", "page", "command"}),
    "configured": frozenset({"differs", "page", "command"}),
    "not yet": frozenset({"differs"}),
    "drawing": frozenset(),
}
ALLOWED: dict[Status, frozenset[str]] = {
    "reproduced": frozenset({"hours"}),
    "smaller": frozenset({"hours"}),
    "configured": frozenset(),
    "not yet": frozenset(),
    "drawing": frozenset({"page"}),
}
"""What an entry of a status has, and what it may have besides."""
INTRODUCTION = """\
# What was reproduced of the five papers

The mechanisms here come from five papers above all. This page lists every table and every figure of them. It says what
was run here and at which size, whether the paper's order was found and by which gap, and, where nothing was run, what
it would take.

Nearly all runs are small: models of a few million parameters at most, trained on two CPU cores in minutes or hours, and
now and then a pretrained one of 135 million, where the papers train up to 1.3 billion parameters on 100 billion tokens.
So read them with care. A small run that finds another order does not refute a paper, and one that finds the same order
does not confirm it at the paper's size. No result of a GPU is among them.
"""
END = """\
The page is printed from [reproduction.yaml](reproduction.yaml) by `python -m benchmarks.reproduction`. Numbers of what
was found are those of the pages that it links to.
"""


class Item(ConfigModel):
    """A table or figure of a paper."""

    item: str
    """Its name in the paper, such as `Table 3` or `Figure S5`."""
    shows: str
    """What the paper reports there, in a few words."""
    status: Status
    """What has been done for it here; `MEANINGS` says what each value means."""
    here: str = ""
    """What was run here and at which size."""
    found: str = ""
    """The order and the gap that were found, with numbers that the linked pages state."""
    differs: str = ""
    """What differs from the paper and why; where nothing was run, what that would take."""
    page: str = ""
    """Page of docs/ with the figures, or with a picture in the place of a drawing; relative to docs/."""
    command: str = ""
    """The command that reproduces it."""
    hours: str = ""
    """How long that takes, where it is known."""

    @model_validator(mode="after")
    def _has_what_its_status_says(self) -> Self:
        optional = set(type(self).__pydantic_fields__) - {"item", "shows", "status"}
        given = {key for key in optional if getattr(self, key)}
        for key in sorted(NEEDED[self.status] - given):
            raise ValueError(f"{self.item} is {self.status!r} and has no {key!r}")
        for key in sorted(given - NEEDED[self.status] - ALLOWED[self.status]):
            raise ValueError(f"{self.item} is {self.status!r} and cannot have {key!r}")
        return self

    @property
    def was_run(self) -> bool:
        """Whether anything was run or computed for it here."""
        return self.status in ("reproduced", "smaller")


class Paper(ConfigModel):
    """A paper with all of its tables and figures."""

    name: str
    """What it is called on the page, in a word or two."""
    title: str
    """Authors and title, as the other pages name them."""
    year: int
    """The year in which it was published."""
    page: str
    """Page of docs/ of what it is about, relative to docs/."""
    items: tuple[Item, ...] = Field(min_length=1)
    """Tables, then figures, in the paper's order."""


class Record(ConfigModel):
    """docs/reproduction.yaml."""

    papers: tuple[Paper, ...] = Field(min_length=1)
    """The papers, in the order of the page."""


def counts(record: Record) -> str:
    """Return the table of papers and statuses."""
    statuses = get_args(Status)
    rows = [
        [f"[{paper.name}](#{paper.name.lower().replace(' ', '-')})"]
        + [sum(item.status == status for item in paper.items) for status in statuses]
        + [len(paper.items)]
        for paper in record.papers
    ]
    total = ["all", *(sum(row[column] for row in rows) for column in range(1, len(statuses) + 2))]
    return table(["paper", *statuses, "all"], [*rows, total])


def last_cell(item: Item, paper: Paper) -> str:
    """Return what was found for an item, or what it would take, with a link."""
    if item.status == "drawing":
        return f"drawn [here]({item.page}) too" if item.page else f"not drawn here; [the mechanism]({paper.page})"
    if item.was_run:
        return f"{item.found} ([figures]({item.page}))"
    return f"{item.differs} ([more]({item.page}))" if item.page else item.differs


def ways(paper: Paper) -> Iterator[str]:
    """Yield a paragraph for each item that was run, and the command of each that can be; equal commands once."""
    first: dict[str, str] = {}
    for item in paper.items:
        if not item.command:
            continue
        words = [f"**{item.item}.**"]
        if item.was_run:
            words += [item.here, f"*Differs:* {item.differs}"]
        else:
            words += ["Not run."]
        if item.hours:
            words += [f"*Time:* {item.hours}."]
        if (earlier := first.setdefault(item.command, item.item)) != item.item:
            yield " ".join([*words, f"*Command:* that of {earlier}."])
        else:
            yield " ".join([*words, "*Command:*"]) + f"\n\n```\n{item.command.rstrip()}\n```"


def section(paper: Paper) -> str:
    """Return the part of the page that is about one paper."""
    rows = [(item.item, item.shows, item.status, last_cell(item, paper)) for item in paper.items]
    return "\n\n".join(
        [
            f"## {paper.name}",
            f"{paper.title}, {paper.year}. What it is about: [{paper.name}]({paper.page}).",
            table(["item", "what the paper shows", "status", "what was found here, or what it would take"], rows),
            *ways(paper),
        ]
    )


def page(record: Record) -> str:
    """Return the whole page as Markdown."""
    meanings = table(["status", "meaning"], [(f"**{status}**", meaning) for status, meaning in MEANINGS.items()])
    parts = [INTRODUCTION, meanings, counts(record), END, *map(section, record.papers)]
    return "\n\n".join(part.strip() for part in parts)


def main() -> None:
    """Print the page."""
    print(page(load_config(Record, RECORD)))


if __name__ == "__main__":
    main()
