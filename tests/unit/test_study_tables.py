"""Tables of a study: what is refused, and what they say of runs that are missing."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import typer
import yaml

from megamem.cli import study as cli_study
from megamem.config.load import parse_config
from megamem.errors import ConfigError
from megamem.evaluation.suites.result import NOT_ASKED, SuiteResult, TaskScore, write_suite
from megamem.runs.result import RunResult, read_result, write_result
from megamem.study import tasks as processes
from megamem.study.collect import check_recovered, records, recovered_curve, suite_figures
from megamem.study.config import StudyConfig
from megamem.study.curves import curve_plots
from megamem.study.grid import load_study, planned_runs
from megamem.study.plots import matplotlib_figure
from megamem.study.report import write_report
from megamem.study.status import run_statuses
from megamem.study.tables import as_json, cells, filled, markdown, plots
from megamem.study.tasks import changes_of, evaluation_file, plain
from tests.finished_study import STUDY, finished_study, write_study
from tests.unit.test_study import RUN as PAIR_RUN
from tests.unit.test_study import STUDY as PAIR

TABLE = STUDY["tables"][0]
FAILED = "huge-elastic-1"


@pytest.fixture
def made(tmp_path):
    """(study, states, records): all done but the last run, which failed."""
    study = finished_study(tmp_path, laws=[])
    runs = planned_runs(study)
    return study, run_statuses(study, runs), records(study, runs)


@pytest.fixture
def pair(tmp_path):
    """The same of a study of two seeds with evaluations; losses: the seed, one more if wide, one more with a memory."""
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(PAIR_RUN))
    tree = {**PAIR, "folder": str(tmp_path / "studies")}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    study = load_study(tmp_path / "study.yaml")
    runs = planned_runs(study)
    for run in runs:
        loss = int(run.labels["seed"]) + (run.labels["width"] == "wide") + (run.labels["model"] == "memory")
        run.folder.mkdir(parents=True)
        figures = {"val_loss": loss, "picture": "x.png", "ok": True}
        write_result(run.folder, RunResult(str(run.folder), 4, 400, 1.0, (1.0,), figures))
        for name, change in changes_of(study, run).items():
            evaluation_file(run, name).write_text(json.dumps({"change": plain(change), "val_loss": 7.0}))
    return study, run_statuses(study, runs), records(study, runs)


def test_cells_are_means_over_seeds(pair):
    study, states, found = pair
    losses = cells(study, study.tables[0], states, found)
    assert losses["memory", "wide"].values == (5.0, 6.0)
    assert losses["memory", "wide"].mean == 5.5
    assert losses["memory", "wide"].spread == pytest.approx(0.5**0.5)
    assert ("plain", "wide") not in losses
    text = markdown(study.tables[0], filled(study, study.tables[0], losses))
    assert "| model | narrow | wide | wide, published |" in text
    assert "| memory | 4.5 ± 0.71 | 5.5 ± 0.71 | 1.5 |" in text
    assert "| plain | 3.5 ± 0.71 |  |  |" in text
    read = cells(study, study.tables[1], states, found)
    assert read["memory", "uniform"].values == (7.0, 7.0)


def test_differences_are_paired_by_seed(pair):
    study, states, found = pair
    table = study.tables[0].model_copy(update={"against": "plain", "paper": {}})
    paired = cells(study, table, states, found)
    assert set(paired) == {("memory", "narrow")}, "wide has nothing to be compared with"
    assert paired["memory", "narrow"].values == (1.0, 1.0)
    assert paired["memory", "narrow"].spread == 0, "where each alone has 0.71"
    assert "`val_loss` minus that of plain, seed by seed" in filled(study, table, paired).note
    # a seed that one of the two has no figure of is in no difference
    del found[0].figures["val_loss"]
    assert cells(study, table, states, found)["memory", "narrow"].seeds == ("4",)


def evaluated(folder, level):
    """What an evaluation leaves of two documents of three chunks, so many nats per token behind the first chunk."""
    documents = [
        {"name": name, "chunk_nats": [40.0, 8 * level, 8 * (level + more)], "chunk_tokens": [8, 8, 8]}
        for name, more in (("a", 0.0), ("b", 0.5))
    ]
    found = {
        "chunk_size": 8, "tokenizer": None, "losses": {"text_sha256": "x", "documents": documents},
        "memory": {"memory_off_documents": documents},
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "evaluation.json").write_text(json.dumps(found))


def test_recovered_shares_are_figures_with_intervals(pair, tmp_path):
    """Between a folder and the run of the study that has another value of an axis, seed by seed."""
    study, states, _ = pair
    recovered = {"local": {"model": "plain"}, "full": str(tmp_path / "full")}
    study = parse_config(StudyConfig, {**study.model_dump(mode="json"), "recovered": recovered}, "study")
    narrow = [run for run in planned_runs(study) if run.labels["width"] == "narrow"]
    study = study.model_copy(update={"skip": (*study.skip, {"model": ("memory",), "width": ("wide",)})})
    assert all("recovered_share" not in record.figures for record in records(study, narrow)), "not evaluated yet"
    evaluated(tmp_path / "full", 2.0)
    for run in narrow:
        seed = int(run.labels["seed"])
        evaluated(run.folder, 4.0 if run.labels["model"] == "plain" else 3.0 + (seed == 3) / 2)
    found = records(study, narrow)
    shares = {record.run: record.figures.get("recovered_share") for record in found if record.evaluation == "trained"}
    # of documents whose gap is 2 nats each
    assert shares == {
        "plain-narrow-3": 0.0, "plain-narrow-4": 0.0,
        "memory-narrow-3": pytest.approx(0.25), "memory-narrow-4": pytest.approx(0.5),
    }  # fmt: skip
    assert not any("recovered_share" in record.figures for record in found if record.evaluation != "trained")
    # with the local model as the control too, what is recovered beyond it is the share itself
    controlled = {"recovered": study.recovered.model_copy(update={"control": {"model": "plain"}})}
    for record in records(study.model_copy(update=controlled), narrow):
        for end in ("", "_low", "_high") if record.evaluation == "trained" else ():
            share = record.figures[f"recovered_share{end}"]
            assert record.figures[f"recovered_over_control{end}"] == pytest.approx(share, abs=1e-15)
    # a reference that goes on learning is none, as long as it does
    result = read_result(narrow[0].folder)
    write_result(narrow[0].folder, replace(result, steps=narrow[0].config.training.steps - 1))
    fewer = records(study, narrow)
    assert {each.run for each in fewer if "recovered_share" in each.figures} == {"plain-narrow-4", "memory-narrow-4"}
    table = study.tables[0].model_copy(update={"figure": "recovered_share", "paper": {}})
    assert cells(study, table, states, fewer)["memory", "narrow"].missing == {"3": "not evaluated"}
    write_result(narrow[0].folder, result)
    chosen = [state for state in states if state.run.labels["seed"] == "3" and state.run.labels["width"] == "narrow"]
    (cell,) = [cell for (row, _), cell in cells(study, table, chosen, found).items() if row == "memory"]
    assert cell.interval == (pytest.approx(0.25), pytest.approx(0.25)), "all documents win as much"
    assert str(cell) == "0.25 [0.25, 0.25]"
    assert cell.bar == pytest.approx((0.0, 0.0))
    assert replace(cell, values=(0.5,), interval=(0.25, 0.625)).bar == (0.25, 0.125), (
        "as far as the interval on each side"
    )
    both = cells(study, table, [state for state in states if state.run.labels["width"] == "narrow"], found)
    assert both["memory", "narrow"].interval is None, "the spread over seeds stands there"
    note = filled(study, table, cells(study, table, chosen, found)).note
    assert "In brackets, where there is one seed, the interval of 95 % over documents." in note
    (tmp_path / "full" / "evaluation.json").write_text((narrow[0].folder / "evaluation.json").read_text())
    # full attention that is no better leaves no gap, and the runs their other figures
    without = records(study, narrow)
    assert all("val_loss" in r.figures and "recovered_share" not in r.figures for r in without)
    # local and full attention read the same file
    plain = [each for each in without if each.evaluation == "trained" and each.run == "plain-narrow-3"]
    assert {each.figures["recovered_gap"] for each in plain} == {0}
    (cell,) = [cell for (row, _), cell in cells(study, table, chosen, without).items() if row == "plain"]
    assert str(cell) == "(0 of 1 seeds; 1 where full attention is no better than local)"


def test_what_cannot_be_compared_leaves_the_other_figures(pair, tmp_path):
    """Found before anything runs where a file alone says it, and in the table's note after that."""
    study, states, _ = pair
    recovered = {"local": str(tmp_path / "local"), "full": str(tmp_path / "full")}
    study = parse_config(StudyConfig, study.model_dump(mode="json") | {"recovered": recovered}, "study")
    runs = planned_runs(study)
    for name, level in (("local", 4.0), ("full", 2.0)):
        evaluated(tmp_path / name, level)
    check_recovered(study.recovered, runs)
    evaluated(runs[0].folder, 3.0)
    file = runs[0].folder / "evaluation.json"
    file.write_text(file.read_text().replace('"text_sha256": "x"', '"text_sha256": "y"'))
    found = records(study, runs)
    assert all("recovered_share" not in record.figures and "val_loss" in record.figures for record in found)
    table = study.tables[0].model_copy(update={"figure": "recovered_share", "paper": {}})
    chosen = [state for state in states if state.run.name == runs[0].name]
    ((_, cell),) = cells(study, table, chosen, found).items()
    assert str(cell) == "(0 of 1 seeds; 1 not comparable)"
    note = filled(study, table, cells(study, table, chosen, found)).note
    assert "Not comparable: " in note
    assert "are not evaluated on the same text; both need the same data.validation" in note
    file = tmp_path / "full" / "evaluation.json"
    whole = file.read_text()
    for given, other, said in (
        ('"chunk_size": 8', '"chunk_size": 9', "have chunks of 9 and 8 tokens"),
        ('"tokenizer": null', '"tokenizer": "t"', "have different tokenizers"),
    ):
        file.write_text(whole.replace(given, other))
        with pytest.raises(ConfigError, match=said):
            check_recovered(study.recovered, runs)
    file.write_text(whole)
    wider = planned_runs(study.model_copy(update={"change": {**study.change, "model.chunk_size": 4}}))
    with pytest.raises(
        ConfigError, match=r"has chunks of 8 tokens, the study's runs of 4; evaluate it with model.chunk"
    ):
        check_recovered(study.recovered, wider)
    check_recovered(study.recovered, [*wider, runs[0]])


def test_recovered_shares_over_training_tokens(pair, tmp_path):
    """From validations, where they read what the evaluations of local and full attention do."""
    study, _, _ = pair
    changes = {**study.change, "evaluation.max_tokens": 64, "evaluation.final_max_tokens": 64}
    recovered = {"local": str(tmp_path / "local"), "full": str(tmp_path / "full")}
    study = parse_config(StudyConfig, study.model_dump(mode="json") | {"recovered": recovered}, "study")
    runs = planned_runs(study.model_copy(update={"change": changes}))
    run = next(each for each in runs if each.labels["model"] == "memory")
    lines = [
        {"step": step, "tokens": 16 * step, "loss": 9.0, "val_loss": 8.0, "val_beyond_first_chunk_loss": loss}
        for step, loss in ((1, 4.25), (2, 3.25), (3, 2.75))
    ]
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert not recovered_curve(study.recovered, run, runs), "nothing to compare with"
    # of two documents, the second with half a nat more in its last chunk
    evaluated(tmp_path / "local", 4.0)
    evaluated(tmp_path / "full", 2.0)
    assert recovered_curve(study.recovered, run, runs) == pytest.approx({16: -0.0625, 32: 0.4375, 48: 0.6875})
    *_, plot = curve_plots(study, runs)
    assert [(series.name, series.y) for series in plot.series] == [(run.name, pytest.approx([-0.0625, 0.4375, 0.6875]))]
    assert (plot.name, plot.log_x, plot.by[0]) == ("curves-recovered-share", False, "model")
    # other text, a reference that the study leaves out, or no gap
    left_out = study.recovered.model_copy(update={"local": {"model": "plain"}})
    assert not recovered_curve(left_out, run, [run])
    unbounded = [each for each in planned_runs(study) if each.name == run.name]
    assert not recovered_curve(study.recovered, unbounded[0], unbounded)
    evaluated(tmp_path / "full", 4.0)
    assert not recovered_curve(study.recovered, run, runs)


def test_runs_to_compare_with_are_looked_for_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "COMMAND", ["false"])
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(PAIR_RUN))
    tree = {**PAIR, "folder": str(tmp_path / "studies"), "recovered": {"local": {"model": "plain"}, "full": "x"}}
    tree |= {"skip": [{"model": ["plain"]}], "tables": []}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    with pytest.raises(
        ConfigError, match=r"recovered: memory-\S+ is compared with .*plain.*which the study leaves out"
    ):
        cli_study.run(tmp_path / "study.yaml")
    # nor is a folder that nothing has been evaluated in
    tree["skip"] = []
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    with pytest.raises(
        ConfigError, match=r"recovered.full: x has no evaluation.json; `megamem evaluate MODEL --out x`"
    ):
        cli_study.run(tmp_path / "study.yaml")
    assert not list(tmp_path.glob("studies/*/journal.jsonl"))


def test_suites_count_for_the_model_they_were_asked_of(pair):
    study, _, _ = pair
    run = planned_runs(study)[0]
    score = TaskScore("arc_easy", "acc", 40.0, 3.0, 20)
    for step, value in ((4, 40.0), (2, 30.0)):
        scores = (replace(score, value=value),)
        write_suite(
            run.folder, SuiteResult("commonsense", "m", scores, {}, None, averaged=True, seconds=1.0, step=step)
        )
    assert suite_figures(run.folder, 4) == {"commonsense.arc_easy.acc": 40.0}
    assert suite_figures(run.folder, 5) == {}, "the model has learned since"
    begun = SuiteResult("commonsense", "m", (score,), {"boolq": NOT_ASKED}, None, averaged=True, seconds=1.0, step=6)
    write_suite(run.folder, begun)
    assert suite_figures(run.folder, 6) == {}, "the suite is still being asked"


def test_a_suite_that_was_asked_in_part_leaves_its_table(pair):
    """The figure is not there, and the table says so instead of being none."""
    study, states, found = pair
    found = [replace(each, figures={**each.figures, "commonsense.arc_easy.acc": 40.0}) for each in found]
    table = study.tables[0].model_copy(update={"figure": "commonsense.average", "paper": {}})
    made = cells(study, table, states, found)
    assert str(made["plain", "narrow"]) == "(0 of 2 seeds; 2 not evaluated)"
    assert cells(study, table, states, []) == {}


def test_a_report_before_anything_has_run(tmp_path):
    study = write_study(tmp_path, laws=[])
    text, folder = write_report(study)
    assert text == ""
    assert "16 runs: 16 waiting" in (folder / "report.html").read_text()


def test_the_report(pair):
    study, _, _ = pair
    text, folder = write_report(study)
    assert "### Losses" in text
    assert (folder / "tables.md").read_text() == text
    data = json.loads((folder / "records.json").read_text())
    assert len(data["records"]) == 10
    assert data["tables"][0]["cells"][0] == {
        "row": "plain", "column": "narrow", "mean": 3.5, "spread": pytest.approx(0.5**0.5), "values": [3.0, 4.0],
        "seeds": ["3", "4"], "missing": {}, "interval": None, "published": None,
    }  # fmt: skip
    for name in ("losses", "read"):
        assert (folder / f"{name}.png").stat().st_size > 10_000


def test_pictures_name_their_categories(pair):
    study, states, found = pair
    plot, *_ = plots(study, study.tables[0], cells(study, study.tables[0], states, found))
    (axes,) = matplotlib_figure(plot).axes
    assert [label.get_text() for label in axes.get_xticklabels()] == list(plot.categories) != []


def test_cells_that_mix_axes_are_refused_before_anything_runs(tmp_path, monkeypatch):
    write_study(tmp_path, tables=[{**TABLE, "columns": "seed", "paper": {}}])
    monkeypatch.setattr(processes, "COMMAND", ["false"])
    for command in (cli_study.run, cli_study.report):
        with pytest.raises(ConfigError, match=r"tables\.losses: size huge, large, .* fall into one cell; make it rows"):
            command(tmp_path / "study.yaml")
    assert not (tmp_path / "studies" / "scaling" / "journal.jsonl").exists()


def test_seeds_that_are_missing_are_counted(made):
    study, states, found = made
    losses = cells(study, study.tables[0], states, found)
    assert str(losses["elastic", "huge"]).endswith(" (1 of 2 seeds; 1 failed)")
    assert "seeds" not in str(losses["none", "huge"])
    shown = {(cell["row"], cell["column"]): cell for cell in as_json(study.tables[0], losses)["cells"]}
    assert (shown["elastic", "huge"]["seeds"], shown["elastic", "huge"]["missing"]) == (["0"], {"1": "failed"})
    # the reference has not begun with the only seed that the other has
    first = next(state.run for state in states if state.run.name == "huge-none-0")
    (first.folder / "result.json").unlink()
    states = [replace(state, state="waiting") if state.run is first else state for state in states]
    found = [record for record in found if record.run != first.name]
    assert str(cells(study, study.tables[0], states, found)["none", "huge"]).endswith(" (1 of 2 seeds; 1 waiting)")
    against = study.tables[0].model_copy(update={"against": "none"})
    assert str(cells(study, against, states, found)["elastic", "huge"]) == "(0 of 2 seeds; 1 waiting, 1 failed)"


def test_a_run_that_diverged_is_left_out_and_said(made):
    study, states, found = made
    del found[0].figures["val_loss"], found[1].figures["val_loss"]
    losses = cells(study, study.tables[0], states, found)
    assert str(losses["none", "small"]) == "(0 of 2 seeds; 2 without a finite figure)", "no empty cell"
    measured, _published = plots(study, study.tables[0], losses)
    assert [list(series.x) for series in measured.series] == [
        ["medium", "large", "huge"], ["small", "medium", "large", "huge"]
    ]  # fmt: skip


def test_a_figure_that_no_run_has_spoils_its_table_only(tmp_path, monkeypatch, capsys):
    """The command ends as its runs did, and says that before the report."""
    misspelt = {**TABLE, "name": "other", "title": "Others", "figure": "los"}
    finished_study(tmp_path, laws=[], tables=[misspelt, TABLE])
    monkeypatch.setattr(processes, "COMMAND", [sys.executable, "-c", "raise SystemExit(5)"])
    with pytest.raises(typer.Exit) as ended:
        cli_study.run(tmp_path / "study.yaml")
    assert ended.value.exit_code == 1, "a run failed"
    said = capsys.readouterr().out
    assert said.index(f"failed: {FAILED}; see") < said.index("### Others")
    assert said.index("No finished run here has `los` as a finite figure.") < said.index("### Losses")
