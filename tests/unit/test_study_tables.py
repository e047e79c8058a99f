"""Tables of a study: what is refused, and what they say of runs that are missing."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import typer

from megamem import cli_study
from megamem.errors import ConfigError
from megamem.study import tasks as processes
from megamem.study.collect import records
from megamem.study.grid import planned_runs
from megamem.study.states import run_states
from megamem.study.tables import as_json, cells, plots
from tests.finished_study import STUDY, finished_study, write_study

TABLE = STUDY["tables"][0]
FAILED = "huge-elastic-1"


@pytest.fixture
def made(tmp_path):
    """(study, states, records): all done but the last run, which failed."""
    study = finished_study(tmp_path, laws=[])
    runs = planned_runs(study)
    return study, run_states(study, runs), records(study, runs)


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
    found = [record for record in found if record["run"] != first.name]
    assert str(cells(study, study.tables[0], states, found)["none", "huge"]).endswith(" (1 of 2 seeds; 1 waiting)")
    against = study.tables[0].model_copy(update={"against": "none"})
    assert str(cells(study, against, states, found)["elastic", "huge"]) == "(0 of 2 seeds; 1 waiting, 1 failed)"


def test_a_run_that_diverged_is_left_out_and_said(made):
    study, states, found = made
    del found[0]["val_loss"], found[1]["val_loss"]
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
