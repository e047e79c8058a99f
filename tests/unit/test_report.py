"""What a study leaves: one table of everything, laws, pictures, a page that stands on its own."""

from __future__ import annotations

import csv
import json
from html.parser import HTMLParser

import plotly.graph_objects as go
import pytest
import torch
from pyarrow import parquet

from megamem.config.load import parse_config
from megamem.config.model import ModelConfig
from megamem.costs.flops import flops_per_token
from megamem.costs.parameters import parameter_counts
from megamem.costs.state_bytes import model_state_bytes
from megamem.errors import ConfigError
from megamem.runs.result import RunResult, write_result
from megamem.study.collect import memory_floats, records
from megamem.study.config import LawConfig, StudyConfig
from megamem.study.grid import planned_runs
from megamem.study.laws import fitted
from megamem.study.laws.fit import Fit, Law
from megamem.study.laws.fitted import fitted_laws
from megamem.study.laws.points import mixing_note
from megamem.study.plots import Plot, Series, plotly_figure
from megamem.study.status import run_statuses
from tests.finished_study import LAWS, STUDY, finished_study, quick_report


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return finished_study(tmp_path_factory.mktemp("study"))


@pytest.fixture(scope="module")
def report(study):
    """(text, folder) of the whole report."""
    return quick_report(study)


# --- one table of everything ---


def test_a_record_says_what_the_run_was(study):
    runs = planned_runs(study)
    found = {record.run: record.row for record in records(study, runs)}
    assert len(found) == len(runs) - 1, "the failed run has no result"
    run = next(run for run in runs if run.name == "large-elastic-1")
    record = found[run.name]
    counts, model = parameter_counts(run.config.model), run.config.model
    assert (record["size"], record["memory"], record["seed"], record["evaluation"]) == (
        "large",
        "elastic",
        "1",
        "trained",
    )
    assert (record["parameters"], record["non_embedding_parameters"]) == (counts["total"], counts["non_embedding"])
    assert record["training_tokens"] == 64 * 64
    assert record["training_flops"] == 64 * 64 * flops_per_token(model, 16)["training"]
    assert record["memory_floats"] == 2 * 4 * 24, "coefficients of order 4 for keys and values of one layer of 24"
    assert found["large-none-1"]["memory_floats"] == 0
    assert record["peak_memory_gib"] == 0.75, "the largest of the ranks"


def test_floats_of_a_memory_that_grows_and_counts():
    """Caches of segments have counters, which are no floats; keys and values grow with the context."""
    tree = {"layers": 1, "hidden_size": 16, "heads": 2, "vocab_size": 64, "chunk_size": 8}
    full = parse_config(ModelConfig, {**tree, "mixer": {"kind": "full_attention"}}, "full")
    assert memory_floats(full, 32) == 2 * 32 * 16, "keys and values of 32 tokens"
    caching = {"kind": "memory_caching", "memory": {"kind": "linear_attention"}, "segment": 8}
    cached = parse_config(ModelConfig, {**tree, "mixer": caching}, "cached")
    counters = 4 * 8  # bytes: one for each chunk's only segment
    assert memory_floats(cached, 32) * 4 + counters == model_state_bytes(cached, 1, torch.float32, 1, 32)["memory"]


def test_csv_and_parquet_hold_every_record(study, report):
    _, folder = report
    found = records(study, planned_runs(study))
    table = parquet.read_table(folder / "records.parquet").to_pylist()
    assert [{name: value for name, value in row.items() if value is not None} for row in table] == [
        record.row for record in found
    ]
    with (folder / "records.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0])[:5] == ["run", "size", "memory", "seed", "evaluation"]
    assert [float(row["val_loss"]) for row in rows] == [record.figures["val_loss"] for record in found]
    assert [row["parameters"] for row in rows] == [str(record.figures["parameters"]) for record in found], (
        "whole numbers"
    )


# --- laws ---


def test_laws_of_the_study(report):
    text, folder = report
    laws = {law["name"]: law["fitted"] for law in json.loads((folder / "records.json").read_text())["laws"]}
    assert [row["group"] for row in laws["loss"]] == ["none", "elastic"]
    for row in laws["loss"]:
        truth = LAWS[row["group"]]
        for name, exponent in zip(("non_embedding_parameters", "training_tokens"), truth.exponents, strict=True):
            _, low, high = row[f"exponent of {name}"]
            assert low <= exponent <= high
        # exponents of 0.4 and 0.5: 0.5 / 0.9
        assert row["best non_embedding_parameters by compute"][0] == pytest.approx(0.5556, abs=0.02)
    for row in laws["taken"]:
        # 48 / 60 of the tokens' part is as good as 0.64 of the tokens, at any loss
        ratios = row["ratios"]["elastic"]
        assert ratios == pytest.approx([0.64] * len(ratios), abs=0.03)
    best = [row for row in laws["best"] if "flops" in row]
    assert [(row["group"], row["flops"]) for row in best] == [
        (m, c) for m in ("none", "elastic") for c in (1.15e8, 1.9e8)
    ]
    # minima of parabolas through the law's own losses; noise of 0.1 % moves them by some percent
    assert [row["best"] for row in best] == pytest.approx([15_711, 20_796, 20_143, 26_973], rel=0.1)
    assert "### Loss by size and tokens" in text
    assert "| exponent of training_tokens |" in text


def test_what_cannot_be_fitted_says_why_in_one_line(report):
    text, _ = report
    assert "- not fitted: size small and medium have the same memory_floats; make it `per`, or choose one" in text
    assert "- memory none: not fitted: budget 1e+30: a parabola needs at least 3 sizes, got 0" in text


def law(**changes):
    """The study's files with one law."""
    return {"laws": [{"name": "law", "title": "Law", **changes}]}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (law(kind="power"), "x: required by kind power of final points"),
        (law(kind="power", x=["parameters"], target=3), "target: means nothing for kind power"),
        (law(kind="power", x=["parameters"], points="validation"), "name one of them"),
        (law(kind="power", x=["parameters", "parameters"]), "names a variable twice"),
        (law(kind="power", x=["size"]), "laws.law.x: value 'huge' of axis size is no number"),
        (law(kind="iso_flop", x=["parameters"]), "axis: required by kind iso_flop of final points"),
        (law(kind="iso_flop", x=["parameters"], points="validation"), "budgets: required"),
        (law(kind="iso_flop", x=["parameters", "size"], axis="size"), "kind iso_flop has one size"),
        (law(kind="tokens_to_loss", axis="size"), "per: required"),
        (law(kind="tokens_to_loss", axis="memory", per="memory"), "'memory' must be an axis of its own"),
        (law(kind="tokens_to_loss", axis="size", per="memory", against="magic"), "against: 'magic' is none of"),
        (law(kind="power", x=["parameters"], per="depth"), "laws.law: axis 'depth' is none of"),
        (
            law(kind="power", x=["training_tokens"], points="validation", per="evaluation"),
            "evaluations have no validations",
        ),
        (law(kind="power", x=["parameters"], where={"size": ["tiny"]}), "laws.law.where.size: 'tiny' is none of"),
        (law(kind="power", x=["parameters"], name="losses"), "tables and laws: losses names two of them"),
    ],
)
def test_laws_that_mean_nothing_are_refused(changes, said):
    with pytest.raises(ConfigError) as refused:
        parse_config(StudyConfig, {**STUDY, **changes}, "study.yaml")
    assert said in str(refused.value)


def results(study, **changes):
    """Notes of one law over the finished study."""
    config = LawConfig(name="law", title="Law", **changes)
    runs = planned_runs(study)
    (result,) = fitted_laws(study.model_copy(update={"laws": (config,)}), runs, records(study, runs))
    return result


def test_laws_of_final_points(study):
    """Budgets and lengths of training by an axis; here sizes stand in for both."""
    unequal = results(study, kind="iso_flop", x=("parameters",), axis="size")
    assert unequal.notes[0].startswith("not fitted: memory none and elastic have the same parameters")
    alone = results(study, kind="iso_flop", x=("parameters",), axis="size", per="memory")
    assert "budget 2.34e+08: a parabola needs at least 3 sizes, got 1" in alone.notes[0]
    taken = results(study, kind="tokens_to_loss", per="memory", axis="size", target=9.0)
    assert taken.rows == [["all", "9.0000", "≤ 4,096 ± 0", "≤ 4,096 ± 0"]], "every run gets there at once"
    assert results(study, kind="tokens_to_loss", per="memory", axis="size", target=0.1).rows[0][2:] == ["never"] * 2
    missing = results(study, kind="power", x=("parameters",), figure="accuracy")
    assert missing.notes == ["not fitted: 'accuracy' is not among a run's figures"]
    assert results(study, kind="power", x=("depth",)).notes[0].startswith("not fitted: x: 'depth' is neither")
    curve = results(study, kind="power", x=("training_tokens",), points="validation", figure="val_accuracy")
    assert curve.notes == ["not fitted: no line with 'val_accuracy' in metrics.jsonl of a finished run yet"]


def test_points_of_several_kinds_of_model_are_said(study):
    """A memory with parameters of its own: no two models have the same x, and one law would go through all."""
    found = records(study, planned_runs(study))
    for record in found:
        record.figures["parameters"] += 100 * (record.labels["memory"] == "elastic")
    none = [record for record in found if record.labels["memory"] == "none"]
    config = LawConfig(name="law", title="Law", kind="iso_flop", x=("parameters",), axis="size")
    one = study.model_copy(update={"laws": (config,)})
    (mixed,) = fitted_laws(one, [], found)
    values = "size (small, medium, large, huge) and memory (none, elastic)"
    said = f"one law through {values}; where their laws may differ make one `per`, or choose under where"
    assert mixed.notes[0] == said
    assert mixing_note(one, config, none) == ""
    assert mixing_note(one, config.model_copy(update={"per": "memory"}), found) == ""


def test_the_best_size_by_compute_is_of_parameters_and_tokens(study, monkeypatch):
    """Compute is no product of other figures, and exponents that are left open say nothing of it."""
    law = Law(1.5, (40.0, 27.0), (0.4, 0.5))
    found = records(study, planned_runs(study))

    def fitted_with(x, low):
        other = Law(1.5, (40.0, 27.0), (low, 0.5))
        monkeypatch.setattr(fitted, "fit_law", lambda *_: Fit(law, (law, other) * 20, x, 16, 0.01))
        config = LawConfig(name="law", title="Law", kind="power", x=x, per="memory")
        (result,) = fitted_laws(study.model_copy(update={"laws": (config,)}), [], found)
        return [row[0] for row in result.rows if "best" in row[0]], len(result.notes)

    assert fitted_with(("parameters", "training_tokens"), 0.4) == (["best parameters by compute"], 2)
    assert fitted_with(("val_loss", "training_tokens"), 0.4) == ([], 1)
    undecided = fitted_with(("parameters", "training_tokens"), 0.001)
    assert undecided == ([], 3), "the law, and what each group leaves open"


def test_validations_under_a_decaying_rate_are_said(study):
    curve = {"kind": "tokens_to_loss", "points": "validation", "per": "memory"}
    said = "the learning rate of 15 of 15 runs decays (optimizer.min_lr_ratio below 1): "
    assert [note for note in results(study, **curve).notes if note.startswith(said)]
    constant = study.model_copy(update={"change": {"optimizer.min_lr_ratio": 1}})
    runs, config = planned_runs(constant), LawConfig(name="law", title="Law", **curve)
    (result,) = fitted_laws(constant.model_copy(update={"laws": (config,)}), runs, records(study, planned_runs(study)))
    assert not any("decays" in note for note in result.notes)


def test_losses_that_are_reached_at_once_or_never_are_said(tmp_path):
    """Curves of two seeds: with the memory one never gets to the loss, without it one is there at its first point."""
    constant = {"optimizer.min_lr_ratio": 1}
    study = finished_study(tmp_path, axes={"memory": STUDY["axes"]["memory"]}, tables=[], laws=[], change=constant)
    curves = {"none-0": (3.0, 2.0), "none-1": (2.0, 2.0), "elastic-0": (3.0, 2.6), "elastic-1": (3.0, 2.0)}
    for run in planned_runs(study):
        lines = [{"step": i + 1, "tokens": 100 * 4**i, "val_loss": loss} for i, loss in enumerate(curves[run.name])]
        (run.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        write_result(
            run.folder, RunResult(str(run.folder), run.config.training.steps, 400, 1.0, (1.0,), {"val_loss": 2.0})
        )

    def taken(against, target):
        return results(study, kind="tokens_to_loss", points="validation", per="memory", against=against, target=target)

    # half way along log tokens between 100 and 400
    never = taken("none", 2.5)
    assert never.rows == [["all", "2.5000", "≤ 150 ± 71", "200 (1 never)", "≥ 2.00 (1 never)"]]
    assert never.data[0]["ratios"] == {"elastic": [None, pytest.approx(2.0)]}
    assert never.data[0]["at_most"] == ["none"]
    assert never.notes[1].startswith("≤, ≥, ?: a curve's first point is at the loss already")
    assert taken("elastic", 2.5).rows[0][-1] == "≤ 0.50 (1 never)"
    assert taken("none", 3.5).rows[0][2:] == ["≤ 100 ± 0", "≤ 100 ± 0", "? 1.00 ± 0.00"]
    assert len(taken("none", 2.8).notes) == 2
    (next(run for run in planned_runs(study) if run.name == "none-1").folder / "metrics.jsonl").unlink()
    assert len(taken("none", 2.8).notes) == 1, "nothing is a bound"


# --- where runs stand ---


def test_states_of_runs(study):
    states = run_statuses(study, planned_runs(study))
    assert [state.state for state in states] == ["done"] * (len(states) - 1) + ["failed"]
    assert (states[0].step, states[-1].step) == (64, 32)
    assert states[-1].failures == ("trained: exit code 5, megamem: <script>alert(1)</script> loss is not finite",)


# --- plots ---


def test_plotly_takes_every_figure(report, page):
    """plotly's own classes refuse keys and values that plotly.js does not know."""
    figures = [json.loads(text) for attrs, text in page.scripts if attrs.get("type") == "application/json"]
    assert len(figures) >= 10
    for figure in figures:
        go.Figure(figure)


def test_text_in_plots_is_escaped():
    plot = Plot(
        "p", "t", "<img src=x>", "y", (Series("<a>", [1, 2], [1.0, 2.0], labels={"axis": "<b>"}),), by=("axis",)
    )
    words = json.dumps(plotly_figure(plot))
    assert "<img" not in words
    assert "<b>" not in words
    assert "&lt;img src=x&gt;" in words


# --- the page ---


class Page(HTMLParser):
    """Scripts, elements, and words outside of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self._script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._script = tag == "script"
        if self._script:
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        self._script = False

    def handle_data(self, data: str) -> None:
        if self._script:
            attrs, text = self.scripts[-1]
            self.scripts[-1] = attrs, text + data
        else:
            self.words += data


@pytest.fixture(scope="module")
def page(report):
    _, folder = report
    return Page((folder / "report.html").read_text())


def test_the_page_needs_nothing_else(page):
    for tag, attributes in page.elements:
        assert tag not in ("link", "img", "iframe", "object"), tag
        assert "src" not in attributes
        assert attributes.get("href", "#").startswith("#")
    policy = [attrs["content"] for tag, attrs in page.elements if attrs.get("http-equiv") == "Content-Security-Policy"]
    assert policy == ["default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"]
    plotly = [text for attrs, text in page.scripts if len(text) > 1_000_000]
    assert len(plotly) == 1, "plotly.js, once"


def test_the_page_says_everything(page):
    for words in ("16 runs: 15 done, 1 failed", "Losses <b>&</b> sizes", "Loss by size and tokens", "not fitted: "):
        assert words in page.words
    assert "exit code 5, megamem: <script>alert(1)</script> loss is not finite" in page.words
    assert not any("alert(1)" in text for _, text in page.scripts)
    names = [attrs["id"] for tag, attrs in page.elements if tag == "div" and attrs.get("class") == "plot"]
    assert names[0] == "plot-losses"
    assert names[-3:] == ["plot-curves-loss", "plot-curves-val-loss", "plot-curves-val-loss-by-flops"]
    assert len(set(names)) == len(names)


def test_pictures_beside(report, page):
    _, folder = report
    for attributes in (attrs for tag, attrs in page.elements if attrs.get("class") == "plot"):
        picture = folder / f"{str(attributes['id']).removeprefix('plot-')}.png"
        assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n", picture
        assert picture.stat().st_size > 8_000
