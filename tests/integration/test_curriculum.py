"""A curriculum is trained by one command, which goes on in the lesson and at the step where it was interrupted."""

from __future__ import annotations

import json
import signal

import pytest
import torch
from safetensors.torch import load_file

from checkpoints.folder import checkpoints_in, open_checkpoint
from checkpoints.read import compare
from megamem.errors import STOPPED
from megamem.runs.status import curriculum_condition, lesson_statuses
from tests.integration.commands import LENGTH, run_tree, write_config
from tests.integration.curriculum_cases import elements_held
from tests.integration.kill import saving, slow_command, wait_until
from tests.integration.ranks import Job, command
from tests.integration.test_models import invoke

pytestmark = pytest.mark.distributed

STEPS = {"1-language": 3, "2-copy": 40, "3-blank": 4}
LESSONS = [
    {"name": "language"},
    {"name": "copy", "start": "language", "training": {"objective": "copy", "steps": 40}, "optimizer": {"lr": 1e-3}},
    # other sequences, another layout
    {
        "name": "blank",
        "start": "copy",
        "training": {"objective": "blank_copy", "steps": 4, "batch_tokens": 8 * LENGTH, "micro_batch_size": 1},
        "data": {"sequence_length": 2 * LENGTH},
        "parallel": {"pp": 2},
    },
]


def curriculum(data, folder, name, **sections):
    common = {"training": {"steps": 3}, "evaluation": {"every": 0}, "logging": {"every": 1}, "checkpoint": {"every": 2}}
    tree = run_tree(data, folder / "runs", name=name, **{**common, **sections})
    tree["data"]["validation"] = []
    return write_config(folder / f"{name}.yaml", {**tree, "lessons": LESSONS})


def newest(folder):
    return max(checkpoint.step for checkpoint in checkpoints_in(folder / "checkpoints") if checkpoint.complete)


@pytest.fixture(scope="module")
def folders(data, tmp_path_factory):
    """The folders of two curricula on two ranks: `calm`, and `tormented`, killed and stopped in its second lesson."""
    folder = tmp_path_factory.mktemp("curriculum")
    calm, tormented = (curriculum(data, folder, name) for name in ("calm", "tormented"))
    with Job(folder / "calm-job", 2, command, "train", str(calm)) as job:
        assert job.codes(120) == [0, 0], job.output(0)
    runs = folder / "runs" / "tormented"
    with Job(folder / "killed", 2, command, "train", str(tormented)) as job:
        job.wait_for(r"lesson 2 of 3: copy[\s\S]*step +5/40", 90)
        for rank in (0, 1):
            job.send(rank, signal.SIGKILL)
        assert job.codes(30) == [-signal.SIGKILL] * 2
    went_on = newest(runs / "2-copy")
    first = (runs / "1-language" / "model.safetensors").stat().st_mtime_ns
    with Job(folder / "stopped", 2, command, "train", str(tormented)) as job:
        job.wait_for(rf"goes on from \S*step-{went_on:08d}[\s\S]*step +\d+/40", 90)
        job.send(0, signal.SIGTERM)  # ranks agree
        assert job.codes(60) == [STOPPED] * 2, job.output(0)
        output = job.output(0, "out")
    assert "lesson 1 of 3: language" in output
    assert "1-language: ended after step 3 already" in " ".join(output.split())
    assert "the same command goes on" in " ".join(output.split())
    statuses = lesson_statuses(runs)
    assert [status.condition for status in statuses] == ["done", "stopped", "waiting"]
    assert curriculum_condition(statuses) == "stopped"
    assert went_on < newest(runs / "2-copy") < 40
    with Job(folder / "last", 2, command, "train", str(tormented)) as job:
        assert job.codes(120) == [0, 0], job.output(0)
    assert (runs / "1-language" / "model.safetensors").stat().st_mtime_ns == first, "it was not trained again"
    return folder / "runs"


@pytest.mark.parametrize("lesson", STEPS)
def test_interrupted_it_is_the_unbroken_one_bit_for_bit(folders, lesson):
    calm, tormented = (folders / name / lesson for name in ("calm", "tormented"))
    one, other = (load_file(folder / "model.safetensors") for folder in (calm, tormented))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    step = f"step-{STEPS[lesson]:08d}"
    count, differences = compare(*(open_checkpoint(folder / "checkpoints" / step) for folder in (calm, tormented)))
    assert count > 0
    assert [str(difference) for difference in differences] == []


def test_lessons_are_runs(folders):
    assert [status.condition for status in lesson_statuses(folders / "calm")] == ["done"] * 3
    for lesson, steps in STEPS.items():
        result = json.loads((folders / "calm" / lesson / "result.json").read_text())
        assert (result["run_dir"], result["steps"]) == (str(folders / "calm" / lesson), steps)
    losses = {
        lesson: [json.loads(line)["loss"] for line in (folders / "calm" / lesson / "metrics.jsonl").open()]
        for lesson in STEPS
    }
    assert {lesson: len(found) for lesson, found in losses.items()} == STEPS
    # the second lesson begins with what the first has learned, and not with a new model, at ln 320 = 5.77
    assert losses["1-language"][0] == pytest.approx(5.77, abs=0.05)
    assert losses["2-copy"][0] < losses["1-language"][-1] + 0.05
    table = invoke("status", folders / "calm")
    assert [line.split()[1] for line in table.splitlines() if "done" in line] == [*STEPS]
    found = json.loads(invoke("status", folders / "calm", "--json"))
    assert (found["state"], [lesson["step"] for lesson in found["lessons"]]) == ("done", [*STEPS.values()])


def test_a_lesson_trained_by_itself_is_the_one_behind_others(folders, tmp_path):
    """Nothing of an earlier lesson is left in the process: ranks that begin with the lesson reach the same weights."""
    config = folders / "calm" / "2-copy" / "config.yaml"
    words = ["train", str(config), f"runs_folder={tmp_path}", "training.steps=40"]
    with Job(tmp_path / "job", 2, command, *words) as job:
        assert job.codes(90) == [0, 0], job.output(0)
    one, other = (load_file(folder / "2-copy" / "model.safetensors") for folder in (folders / "calm", tmp_path))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_signal_during_the_last_save_of_a_lesson_stops_the_curriculum(data, tmp_path):
    path = curriculum(data, tmp_path, "school", checkpoint={"every": 0, "asynchronous": False})
    words = ["train", str(path), "lessons.blank.parallel.pp=1"]
    first, second = (tmp_path / "runs" / "school" / name for name in ("1-language", "2-copy"))
    with Job(tmp_path / "job", 1, slow_command, 0.5, *words) as job:
        wait_until(lambda: saving(first / "checkpoints"), 60)
        job.send(0, signal.SIGTERM)
        assert job.codes(60) == [STOPPED], job.output(0)
    assert newest(first) == STEPS["1-language"]
    assert not second.exists()


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_a_lesson_leaves_no_memory_behind(data, tmp_path, zero_stage):
    path = curriculum(data, tmp_path, "small", parallel={"zero_stage": zero_stage})
    overrides = ["training.steps=2", "parallel.pp=1"]
    with Job(tmp_path / "job", 1, elements_held, str(path), overrides) as job:
        during, after = job.results()[0]
    assert min(during) > 53_408, "the large tensors of a model of 53,408 parameters, and two moments of each"
    assert after == [0, 0, 0]
