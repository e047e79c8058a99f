"""The page of a study, report.html: all results in one file that needs no network."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape
from plotly.offline import get_plotlyjs

from megamem.evaluation.report import finite
from megamem.study.collect import Record
from megamem.study.config import TRAINED, StudyConfig
from megamem.study.plots import Plot, plotly_figure
from megamem.study.status import RunStatus

FIGURES = {
    "val_loss": ("loss", "{:.4f}"),
    "parameters": ("parameters", "{:,.0f}"),
    "training_tokens": ("tokens", "{:,.0f}"),
    "training_flops": ("FLOPs", "{:.2e}"),
    "memory_floats": ("memory floats", "{:,.0f}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "peak_memory_gib": ("GiB", "{:.2f}"),
}
"""Figures in the list of runs: head of the column, and format."""


@dataclass(frozen=True)
class Section:
    """A table with its plots."""

    title: str
    heads: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    notes: Sequence[str] = ()
    plots: Sequence[Plot] = ()


def page(
    study: StudyConfig,
    tables: Sequence[Section],
    laws: Sequence[Section],
    curves: Sequence[Plot],
    statuses: Sequence[RunStatus],
    found: Sequence[Record],
) -> str:
    """Return the page as HTML. Whatever comes from files is escaped, and the page may load nothing."""
    template = files("megamem.study").joinpath("page.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"code": _code, "json": _json, "figure": plotly_figure}
    counts = Counter(status.state for status in statuses)
    return environment.from_string(template).render(
        name=study.name,
        written=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        counts=", ".join(f"{count} {state}" for state, count in counts.items()),
        tables=tables,
        laws=laws,
        curves=curves,
        heads=[
            *statuses[0].run.labels,
            "state",
            "step",
            *(head for head, _ in FIGURES.values()),
            "minutes",
            "what failed",
        ],
        runs=_run_rows(statuses, found),
        plotly=Markup(get_plotlyjs()),
    )


def _run_rows(statuses: Sequence[RunStatus], found: Sequence[Record]) -> list[tuple[str, str, list[str]]]:
    """Return name, state and cells of each run."""
    trained = {record.run: record.figures for record in found if record.evaluation == TRAINED}
    rows = []
    for status in statuses:
        figures: Mapping[str, float] = trained.get(status.run.name, {})
        done, of = status.evaluations
        job = f" (job {status.jobs[-1].number})" if status.in_queue else ""
        cells = [
            *status.run.labels.values(),
            status.state + job + (f", {done} of {of} evaluations" if of else ""),
            f"{status.step:,} / {status.steps:,}",
            *(form.format(figures[name]) if name in figures else "" for name, (_, form) in FIGURES.items()),
            f"{status.seconds / 60:.1f}" if status.seconds else "",
            "; ".join(status.failures),
        ]
        rows.append((status.run.name, status.state, cells))
    return rows


def _code(words: str) -> Markup:
    """Return escaped text, with what stands between backticks as code."""
    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(words))))


def _json(value: object) -> Markup:
    """Return JSON that cannot end its script element; numbers that are not finite become null."""
    return Markup(json.dumps(finite(value), separators=(",", ":")).replace("<", "\\u003c"))
