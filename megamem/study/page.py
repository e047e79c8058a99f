"""report.html: everything a study has found in one file that needs no network."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape
from plotly.offline import get_plotlyjs

from megamem.evaluation.report import finite
from megamem.study.collect import RUN, Record
from megamem.study.config import READING, TRAINED, StudyConfig
from megamem.study.plots import Plot, plotly_figure
from megamem.study.states import RunState

FIGURES = {
    "val_loss": ("loss", "{:.4f}"),
    "parameters": ("parameters", "{:,.0f}"),
    "training_tokens": ("tokens", "{:,.0f}"),
    "training_flops": ("FLOPs", "{:.2e}"),
    "memory_floats": ("memory floats", "{:,.0f}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "peak_memory_gib": ("GiB", "{:.2f}"),
}
"""Of each run: heads and forms."""


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
    states: Sequence[RunState],
    found: Sequence[Record],
) -> str:
    """The page. Whatever comes from files is escaped, and the page may load nothing."""
    template = files("megamem.study").joinpath("page.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"code": _code, "json": _json, "figure": plotly_figure}
    counts = Counter(state.state for state in states)
    return environment.from_string(template).render(
        name=study.name,
        written=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        counts=", ".join(f"{count} {state}" for state, count in counts.items()),
        tables=tables,
        laws=laws,
        curves=curves,
        heads=[
            *states[0].run.labels,
            "state",
            "step",
            *(head for head, _ in FIGURES.values()),
            "minutes",
            "what failed",
        ],
        runs=_run_rows(states, found),
        plotly=Markup(get_plotlyjs()),
    )


def _run_rows(states: Sequence[RunState], found: Sequence[Record]) -> list[tuple[str, str, list[str]]]:
    """(name, state, cells) of each run."""
    trained = {record[RUN]: record for record in found if record[READING] == TRAINED}
    rows = []
    for state in states:
        record: Mapping[str, Any] = trained.get(state.run.name, {})
        done, of = state.readings
        job = f" (job {state.jobs[-1].number})" if state.in_queue else ""
        cells = [
            *state.run.labels.values(),
            state.state + job + (f", {done} of {of} readings" if of else ""),
            f"{state.step:,} / {state.run.config.steps:,}",
            *(form.format(record[name]) if _number(record.get(name)) else "" for name, (_, form) in FIGURES.items()),
            f"{state.seconds / 60:.1f}" if state.seconds else "",
            "; ".join(state.failures),
        ]
        rows.append((state.run.name, state.state, cells))
    return rows


def _number(value: object) -> bool:
    return isinstance(value, int | float)


def _code(words: str) -> Markup:
    """Escaped text; what stands between backticks as code."""
    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(words))))


def _json(value: object) -> Markup:
    """JSON that cannot end its script element; numbers that JSON has no word for become null."""
    return Markup(json.dumps(finite(value), separators=(",", ":")).replace("<", "\\u003c"))
