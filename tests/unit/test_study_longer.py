"""A study that was made longer: its runs go on, and its evaluations are made again."""

from __future__ import annotations

import yaml

from megamem.runs.result import RunResult, write_result
from megamem.study.collect import records
from megamem.study.grid import planned_runs
from megamem.study.status import run_statuses
from megamem.study.tasks import config_file
from tests.unit.test_study import fake, run, study  # noqa: F401, fixtures


def test_a_study_that_was_made_longer_goes_on(study, fake):  # noqa: F811
    """Its runs are trained once more, and evaluated once more behind that, though nothing else has changed."""
    run(study)
    longer = study.model_copy(update={"change": {**study.change, "training.steps": 5}})
    runs = planned_runs(longer)
    assert {state.state for state in run_statuses(longer, runs)} == {"stopped"}
    assert not any(state.failures for state in run_statuses(longer, runs))
    assert records(longer, runs) == []
    for other in runs:  # what `megamem train` leaves when it has gone on
        write_result(other.folder, RunResult(str(other.folder), 5, 500, 1.0, (1.0,), {"val_loss": 1}))
    states = run_statuses(longer, runs)
    assert [state.state for state in states] == ["done"] * 2 + ["trained"] * 4
    assert {state.evaluations for state in states} == {(0, 0), (0, 1)}, "those of the shorter run count no more"
    before = len(fake())
    outcome, _, _ = run(longer)
    assert outcome.failed == []
    assert len(fake()) - before == 4, "one evaluation of each run with a memory"
    assert yaml.safe_load(config_file(longer, runs[0]).read_text())["training"]["steps"] == 2, "not trained here"
    (runs[0].folder / "result.json").unlink()
    run(longer)
    assert yaml.safe_load(config_file(longer, runs[0]).read_text())["training"]["steps"] == 5
