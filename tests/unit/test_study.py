"""Studies: the grid, the queue of processes."""

import sys
from pathlib import Path

import pytest
import yaml

from megamem.config.load import parse_config
from megamem.errors import ConfigError, RunFolderError
from megamem.study import queue
from megamem.study import tasks as processes
from megamem.study.collect import mean_training_flops, records
from megamem.study.config import StudyConfig
from megamem.study.grid import load_study, planned_runs
from megamem.study.journal import read_journal
from megamem.study.queue import Queue
from megamem.study.status import run_statuses
from megamem.study.tasks import config_file, tasks

RUN = {
    "name": "small",
    "model": {"layers": 2, "hidden_size": 16, "heads": 2, "vocab_size": 64, "chunk_size": 8},
    "data": {"sources": [], "sequence_length": 16},
    "training": {"steps": 2, "batch_tokens": 16, "precision": "fp32"},
    "parallel": {"device": "cpu"},
}
STUDY = {
    "name": "pair",
    "run": "run.yaml",
    "change": {"data.sources": ["shards"]},
    "seeds": [3, 4],
    "axes": {
        "model": {
            "plain": {},
            "memory": {"model.memory": [{"layers": [1], "mixer": {"kind": "elastic_memory", "order": 4}}]},
        },
        "width": {"narrow": {}, "wide": {"model.hidden_size": 32}},
    },
    "adjust": [{"where": {"model": ["memory"], "width": ["wide"]}, "change": {"model.memory.0.mixer.order": 6}}],
    "skip": [{"model": ["plain"], "width": ["wide"]}],
    "evaluations": {
        "uniform": {"where": {"model": ["memory"]}, "change": {"model.memory.0.mixer.sampling": "uniform"}},
    },
    "tables": [
        {"name": "losses", "title": "Losses", "figure": "val_loss", "rows": "model", "columns": "width",
         "paper": {"memory": {"wide": 1.5}}, "source": "nowhere"},
        {"name": "read", "title": "Read otherwise", "figure": "val_loss", "rows": "model", "columns": "evaluation",
         "where": {"width": ["narrow"]}},
    ],
}  # fmt: skip


@pytest.fixture
def study(tmp_path):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN))
    (tmp_path / "study.yaml").write_text(
        yaml.safe_dump({**STUDY, "folder": str(tmp_path / "studies")}, sort_keys=False)
    )
    return load_study(tmp_path / "study.yaml")


# --- the grid ---


def test_every_combination_but_those_skipped(study):
    runs = planned_runs(study)
    assert [run.name for run in runs] == [
        f"{model}-{width}-{seed}"
        for model, width in (("plain", "narrow"), ("memory", "narrow"), ("memory", "wide"))
        for seed in (3, 4)
    ]
    last = runs[-1]
    assert last.labels == {"model": "memory", "width": "wide", "seed": "4"}
    assert last.tree["model"]["hidden_size"] == 32
    assert [run.tree["model"]["memory"][0]["mixer"]["order"] for run in runs[2:]] == [4, 4, 6, 6]
    assert last.tree["training"]["seed"] == last.tree["data"]["seed"] == 4
    assert last.tree["data"]["sources"] == ["shards"]
    assert last.folder == study.folder / "pair" / "runs" / "memory-wide-4"


def test_a_combination_that_cannot_run_is_named(study):
    axes = {"width": {"odd": {"model.heads": 3}}}
    broken = parse_config(StudyConfig, {"name": "x", "run": str(study.run), "axes": axes, "change": study.change}, "s")
    with pytest.raises(ConfigError, match=r"x: width odd, seed 0: .*heads 3"):
        planned_runs(broken)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"axes": {"seed": {"a": {}}}}, "axes.seed: reserved; give seeds"),
        ({"axes": {}}, "axes"),
        ({"seeds": [3, 4, 3]}, "seeds: 3 is given twice; each seed is a run of its own"),
        ({"axes": {"run": {"a": {}}}}, "axes.run: reserved; take another name"),
        ({"skip": [{"color": ["red"]}]}, "skip.0: axis 'color' is none of model, seed, width"),
        ({"skip": [{"evaluation": ["uniform"]}]}, "skip.0: axis 'evaluation' is none of model, seed, width"),
        ({"skip": [{"width": ["huge"]}]}, "skip.0.width: 'huge' is none of narrow, wide"),
        ({"evaluations": {"trained": {"change": {}}}}, "evaluations.trained: reserved"),
        (
            {"recovered": {"local": "x", "full": {"model": "huge"}}},
            "recovered.full.model: 'huge' is none of memory, plain",
        ),
        ({"recovered": {"local": {"depth": "x"}, "full": "x"}}, "recovered.local: axis 'depth'"),
        ({"tables": [{**STUDY["tables"][0], "rows": "depth"}]}, "tables.losses: axis 'depth'"),
        ({"tables": [{**STUDY["tables"][0], "paper": {"magic": {}}}]}, "paper: row 'magic'"),
        ({"tables": [{**STUDY["tables"][0], "against": "magic"}]}, "tables.losses.against: 'magic' is none of"),
        ({"tables": [{**STUDY["tables"][0], "rows": "seed", "against": "3"}]}, "cannot be paired by seed"),
        ({"tables": [{**STUDY["tables"][0], "paper": {"plain": {"huge": 1}}}]}, "paper.plain: column 'huge'"),
    ],
)
def test_bad_studies_are_refused(change, said):
    with pytest.raises(ConfigError) as refused:
        parse_config(StudyConfig, {**STUDY, **change}, "study.yaml")
    assert said in str(refused.value)


def test_the_studies_of_the_repository_can_be_planned():
    folder = Path(__file__).parents[2] / "configs" / "studies"
    found = [path for path in folder.rglob("*.yaml") if "axes" in path.read_text()]
    assert found
    for path in found:
        assert planned_runs(load_study(path))


def test_the_models_of_the_efficiency_study_are_trained_with_equal_compute():
    folder = Path(__file__).parents[2] / "configs" / "studies" / "memory_models"
    runs = planned_runs(load_study(folder / "efficiency.yaml"))
    budgets = {
        run.labels["model"]: run.config.steps * run.config.training.batch_tokens * mean_training_flops(run.config)
        for run in runs
    }
    assert len(budgets) == 4
    # whole steps, of which there are a thousand
    assert max(budgets.values()) <= 1.001 * min(budgets.values())


# --- the queue, with a stand-in for megamem ---

FAKE = """
import json, os, pathlib, signal, sys, time, yaml
verb, path = sys.argv[1:3]
calls = pathlib.Path(os.environ["CALLS"])
with calls.open("a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
with open(f"{calls}-devices", "a") as file:
    file.write(os.environ.get("CUDA_VISIBLE_DEVICES", "all") + f" {time.time()} ")
    time.sleep(float(os.environ.get("LASTS", 0)))
    file.write(f"{time.time()}\\n")
if verb == "evaluate":
    print("a table")
    print(json.dumps({"val_loss": 7.0}))
    print(os.environ.get("LAST_LINE", ""), end="")
    sys.exit()
tree = yaml.safe_load(open(path))
folder = pathlib.Path(tree["runs_folder"]) / tree["name"]
folder.mkdir(parents=True, exist_ok=True)
if tree["name"] == os.environ.get("FAILS") and not (folder / "once").exists():
    (folder / "once").touch()
    sys.exit(6)
if tree["name"] == os.environ.get("ALWAYS_FAILS"):
    sys.exit(int(os.environ["CODE"]))
if tree["name"] == os.environ.get("HANGS"):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    time.sleep(60)
loss = tree["training"]["seed"] + (tree["model"]["hidden_size"] == 32) + bool(tree["model"].get("memory"))
result = {"run_dir": str(folder), "steps": 4, "tokens": 64, "tokens_per_second": 1.0, "memory_gib_by_rank": [1.0]}
found = {"val_loss": loss, "picture": "x.png", "ok": True}
(folder / "result.json").write_text(json.dumps({**result, **found}))
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    (tmp_path / "fake.py").write_text(FAKE)
    monkeypatch.setattr(processes, "COMMAND", [sys.executable, str(tmp_path / "fake.py")])
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    return lambda: (tmp_path / "calls").read_text().splitlines() if (tmp_path / "calls").exists() else []


def run(study):
    said, moved = [], []
    outcome = Queue(study, said.append, lambda done, total: moved.append((done, total))).run(planned_runs(study))
    return outcome, said, moved


def test_runs_then_evaluations_then_nothing_more(study, fake):
    outcome, said, moved = run(study.model_copy(update={"parallel": 2}))
    assert (len(outcome.done), outcome.failed, outcome.stopped) == (10, [], False)
    assert moved[-1] == (10, 10)
    assert len(said) == 10
    evaluations = [call for call in fake() if call.startswith("evaluate")]
    assert len(evaluations) == 4
    how = 'model.memory.0.mixer.sampling="uniform" --dtype fp32 --json --device cpu'
    assert all(call.endswith(how) for call in evaluations)
    again, said, moved = run(study)
    assert (len(again.done), said, len(fake())) == (10, [], 10)
    found = records(study, planned_runs(study))
    assert len(found) == 10
    assert found[0].row.items() >= {
        "model": "plain", "width": "narrow", "seed": "3", "evaluation": "trained", "run": "plain-narrow-3",
        "val_loss": 3,
    }.items()  # fmt: skip
    assert {history.state for history in read_journal(study.folder / "pair").values()} == {"ended"}


def test_an_evaluation_defined_otherwise_is_made_again(study, fake):
    run(study)
    evaluation = study.evaluations["uniform"]
    narrower = evaluation.model_copy(
        update={"change": {"model.memory.0.mixer.samples": 3}, "where": {"width": ("wide",)}}
    )
    changed = study.model_copy(update={"evaluations": {"uniform": narrower}})
    assert len(records(changed, planned_runs(changed))) == 6, "neither the old definition nor runs it is not for"
    outcome, said, _ = run(changed)
    assert (len(outcome.done), len(said)) == (8, 2)
    assert len(records(changed, planned_runs(changed))) == 8


def test_one_process_at_a_time(study, fake):
    with queue.study_lock(study) as lock:
        lock.take()
        with pytest.raises(RunFolderError, match="another process is running this study"):
            run(study)
    assert not config_file(study, planned_runs(study)[0]).exists(), "the other's configurations are left alone"


def spans(tmp_path):
    """(devices, begin, end) of all processes."""
    lines = [line.split() for line in (tmp_path / "calls-devices").read_text().splitlines()]
    return [(devices, float(begin), float(end)) for devices, begin, end in lines]


def test_a_call_that_starts_nothing_leaves_nothing_behind(study, fake):
    """A study of other steps that was stopped before it began is none that the runs were begun with."""
    run(study)
    longer = study.model_copy(update={"change": {**study.change, "training.steps": 5}})
    tasks(longer, planned_runs(longer))
    again, _, _ = run(study)
    assert len(again.done) == 10


def test_what_differs_from_a_run_that_was_begun_is_named(study, fake, tmp_path):
    run(study)
    for key, value, said in (
        ("training.steps", 1, "training.steps was 2, the study now gives 1"),
        ("model.memory.0.mixer.order", 5, r'model.memory was \[.*"order": 4.*, the study now gives .*"order": 5'),
        ("optimizer.lr", 0.5, "optimizer.lr was null, the study now gives 0.5"),
    ):
        axes = {**study.axes, "model": {"memory": {**study.axes["model"]["memory"], key: value}}}
        changed = study.model_copy(update={"axes": axes, "adjust": (), "skip": ({"width": ("wide",)},)})
        with pytest.raises(RunFolderError, match=f"was begun with another configuration .*: {said}"):
            run(changed)
    moved = study.model_copy(update={"folder": tmp_path / "elsewhere"})
    (tmp_path / "studies").rename(tmp_path / "elsewhere")
    assert len(records(moved, planned_runs(moved))) == 10


def test_words_instead_of_figures_are_a_failure(study, fake, monkeypatch):
    """Of one evaluation: the others are made, and a result that was cut short is none."""
    monkeypatch.setenv("LAST_LINE", "bye")
    outcome, said, _ = run(study)
    assert (len(outcome.done), len(outcome.failed)) == (6, 4)
    assert any("memory-narrow-3, uniform: failed (0); see" in line for line in said)
    monkeypatch.delenv("LAST_LINE")
    (planned_runs(study)[0].folder / "result.json").write_text('{"val_loss": 3')
    assert len(records(study, planned_runs(study))) == 5
    outcome, said, _ = run(study)
    assert (len(outcome.done), outcome.failed) == (10, [])
    assert "plain-narrow-3: done" in said


def test_runs_say_in_weights_and_biases_what_they_are(study):
    run = planned_runs(study)[-1]
    shown = run.config.logging.wandb
    assert (shown.group, shown.tags) == ("pair", ("model:memory", "width:wide", "seed:4"))
    assert run.tree["logging"]["wandb"] == {"group": "pair", "tags": ["model:memory", "width:wide", "seed:4"]}
    own = {"logging.wandb.group": "ours", "logging.wandb.tags": ["small"]}
    named = planned_runs(study.model_copy(update={"change": {**study.change, **own}}))[-1].config.logging.wandb
    assert (named.group, named.tags[:2]) == ("ours", ("small", "model:memory"))
    without = planned_runs(study.model_copy(update={"change": {**study.change, "logging.wandb.mode": "disabled"}}))[-1]
    assert without.tree["logging"]["wandb"] == {"mode": "disabled"}


def test_an_evaluation_that_cannot_be_is_refused_before_anything_runs(study):
    wrong = study.evaluations["uniform"].model_copy(update={"change": {"evaluation.corruption.shares": 0.5}})
    broken = study.model_copy(update={"evaluations": {"noise": wrong}})
    with pytest.raises(ConfigError, match=r"model memory, width narrow, seed 3, evaluation noise: .*shares"):
        planned_runs(broken)
    axes = {**study.axes, "width": {"narrow": {"model.memory.3.mixer.order": 2}, "wide": {}}}
    with pytest.raises(ConfigError, match=r"pair: model memory, width narrow, seed 3: .*'3' is no index"):
        planned_runs(study.model_copy(update={"axes": axes, "skip": ({"model": ("plain",)},)}))


def test_an_axis_named_as_a_figure_keeps_its_labels(study, fake):
    axes = {"val_loss": {"low": {}, "high": {}}}
    other = study.model_copy(update={"axes": axes, "adjust": (), "skip": (), "evaluations": {}, "tables": ()})
    run(other)
    assert {record.row["val_loss"] for record in records(other, planned_runs(other))} == {"low", "high"}


def test_runs_side_by_side_have_devices_of_their_own(study, fake, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    monkeypatch.setenv("LASTS", "0.5")
    run(study.model_copy(update={"parallel": 2}))
    seen = spans(tmp_path)
    assert {devices for devices, *_ in seen} == {"4", "5"}
    for device in ("4", "5"):
        times = sorted((begin, end) for devices, begin, end in seen if devices == device)
        assert all(end <= begin for (_, end), (begin, _) in zip(times, times[1:], strict=False)), "one after another"


def test_a_run_that_fails_is_tried_again(study, fake, monkeypatch):
    monkeypatch.setenv("FAILS", "memory-wide-3")
    outcome, _, _ = run(study)
    assert (len(outcome.done), outcome.failed) == (10, [])
    assert sum("memory-wide-3.yaml" in call for call in fake()) == 2


@pytest.mark.parametrize(("code", "calls"), [(6, 2), (5, 1)])
def test_a_run_that_goes_on_failing_is_listed(study, fake, monkeypatch, code, calls):
    """After a stuck rank it is tried again; a loss that is not finite would be so again."""
    monkeypatch.setenv("ALWAYS_FAILS", "memory-wide-3")
    monkeypatch.setenv("CODE", str(code))
    outcome, said, _ = run(study)
    assert [task.name for task in outcome.failed] == ["memory-wide-3"]
    assert any(f"memory-wide-3: failed ({code}); see " in line for line in said)
    assert sum("memory-wide-3.yaml" in call for call in fake()) == calls
    (failed,) = [state for state in run_statuses(study, planned_runs(study)) if state.state != "done"]
    assert (failed.run.name, failed.state, failed.evaluations) == ("memory-wide-3", "failed", (0, 1))
    assert failed.failures == (f"trained: exit code {code}",)
    assert len(outcome.done) == 8, "everything else, but for its evaluation"
    later, said, _ = run(study)
    assert [task.name for task in later.failed] == ["memory-wide-3"], "still"
    assert said == [f"memory-wide-3: failed ({code}) in an earlier call; --retry-failed starts it once more"]
    assert sum("memory-wide-3.yaml" in call for call in fake()) == calls
    monkeypatch.delenv("ALWAYS_FAILS")
    mended = Queue(study, print, lambda done, total: None, retry_failed=True).run(planned_runs(study))
    assert (len(mended.done), mended.failed) == (10, [])


def test_a_folder_of_another_configuration_is_refused(study, fake):
    run(study)
    for change in ({"training.steps": 1}, {"optimizer.lr": 0.5}, {"training.steps": 3, "optimizer.lr": 0.5}):
        changed = study.model_copy(update={"change": {**study.change, **change}})
        with pytest.raises(RunFolderError, match="plain-narrow-3: was begun with another configuration"):
            tasks(changed, planned_runs(changed))
