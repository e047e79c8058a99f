"""Curricula as configuration: what becomes of the lessons, and the one line with which a mistake is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from megamem.cli.main import app
from megamem.config.curriculum import FILE, dump_curriculum, lesson_folders, load_runs
from megamem.config.recipe import auto_overrides, load_run
from megamem.errors import ConfigError, MegamemError, RunFolderError
from megamem.runs.status import curriculum_condition, lesson_statuses
from megamem.study.grid import load_study, planned_runs
from megamem.training.curriculum import train_lessons
from tests.integration.commands import run_tree
from tests.unit.data_helpers import make_shards

ROOT = Path(__file__).parents[2]
LESSONS = [
    {"name": "language"},
    {"name": "blank", "start": "language", "training": {"objective": "blank_copy", "steps": 3},
     "optimizer": {"lr": 1e-4}},
    {"name": "copy", "start": "blank", "training": {"objective": "copy"}, "data": {"sequence_length": 256}},
]  # fmt: skip


def write(folder, lessons=LESSONS, **sections):
    path = folder / "lessons.yaml"
    common = {"name": "school", "training": {"batch_tokens": 1024}}
    tree = run_tree(folder, folder / "runs", **{**common, **sections})
    path.write_text(yaml.safe_dump({**tree, "lessons": lessons}))
    return path


def refused(folder, *overrides, lessons=LESSONS, **sections):
    with pytest.raises(ConfigError) as caught:
        load_runs(write(folder, lessons, **sections), overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message.removeprefix(f"{folder / 'lessons.yaml'}: ")


def changed(number, **changes):
    return [{**lesson, **(changes if place == number else {})} for place, lesson in enumerate(LESSONS)]


class TestLessons:
    def test_each_is_a_complete_run_in_a_folder_of_its_own(self, tmp_path):
        folder = tmp_path / "runs" / "school"
        runs = load_runs(write(tmp_path))
        assert [run.run_folder for run in runs] == [folder / name for name in ("1-language", "2-blank", "3-copy")]
        assert [run.lesson for run in runs] == ["language", "blank", "copy"]
        assert [run.training.objective.kind for run in runs] == ["next_token", "blank_copy", "copy"]
        assert [run.steps for run in runs] == [6, 3, 6]
        assert [run.data.sequence_length for run in runs] == [128, 128, 256]
        assert [run.optimizer.lr for run in runs] == [2e-3, 1e-4, 2e-3]
        assert [run.training.init_from for run in runs] == [None, runs[0].weights, runs[1].weights]
        assert runs[0].weights == folder / "1-language" / "model.safetensors"

    def test_a_lesson_may_change_everything_that_a_run_says(self, tmp_path):
        model = {"layers": 3, "mixer": "full_attention", "memory": []}
        runs = load_runs(write(tmp_path, changed(2, start=None, model=model, parallel={"pp": 3})))
        assert [run.model.layers for run in runs] == [2, 2, 3]
        assert runs[2].model.mixer.kind == "full_attention"
        assert runs[2].training.init_from is None

    def test_overrides_are_for_all_lessons_or_one_and_the_last_counts(self, tmp_path):
        path = write(tmp_path)
        words = ["training.steps=9", "lessons.copy.training.steps=5", "name=other", "optimizer.lr=0.5"]
        runs = load_runs(path, words)
        assert [run.steps for run in runs] == [9, 9, 5]
        assert [run.optimizer.lr for run in runs] == [0.5] * 3
        assert {run.runs_folder.name for run in runs} == {"other"}
        assert runs[2].training.init_from == runs[1].weights, "they are those of the renamed folder"
        assert [run.steps for run in load_runs(path, ["lessons.copy.training.steps=5", "training.steps=9"])] == [9] * 3
        starts = [run.training.init_from for run in load_runs(path, ["lessons.copy.start=language"])]
        assert starts[2] == starts[1]

    def test_a_file_is_told_from_a_lesson_by_its_dot_or_slash(self, tmp_path):
        for given in ("language.safetensors", "weights/language"):
            assert str(load_runs(write(tmp_path, changed(1, start=given)))[1].training.init_from) == given

    def test_what_is_left_to_the_planner_goes_to_the_ranks_by_lesson(self, tmp_path):
        path = write(tmp_path, changed(1, parallel={"zero_stage": "auto"}))
        runs = load_runs(path)
        assert [run.auto.fields for run in runs] == [(), ("parallel.zero_stage",), ()]
        chosen = runs[1].model_copy(update={"auto": runs[1].auto.model_copy(update={"devices": 2})})
        words = [word for run in (runs[0], chosen, runs[2]) for word in auto_overrides(run)]
        assert words[0] == "lessons.blank.parallel.zero_stage=1"
        assert load_runs(path, words) == [runs[0], chosen, runs[2]]

    def test_the_file_in_its_folder_is_the_same_curriculum(self, tmp_path):
        runs = load_runs(write(tmp_path))
        again = tmp_path / "again.yaml"
        again.write_text(dump_curriculum(runs))
        assert load_runs(again) == runs

    def test_checkpoints_elsewhere_lie_below_the_curriculum(self, tmp_path):
        from checkpoints.location import recorded_checkpoints, run_checkpoints
        from megamem.config.load import dump_yaml

        run = load_runs(write(tmp_path), [f"checkpoint.folder={tmp_path / 'saves'}"])[1]
        assert run_checkpoints(run) == tmp_path / "saves" / "school" / "2-blank"
        run.run_folder.mkdir(parents=True)
        (run.run_folder / "config.yaml").write_text(dump_yaml(run))
        assert recorded_checkpoints(run.run_folder) == run_checkpoints(run)

    def test_a_file_without_lessons_is_a_run(self, tmp_path):
        path = write(tmp_path)
        tree = yaml.safe_load(path.read_text())
        del tree["lessons"]
        path.write_text(yaml.safe_dump(tree))
        assert load_runs(path, ["training.steps=2"]) == [load_run(path, ["training.steps=2"])]


@pytest.mark.parametrize(
    ("lessons", "line"),
    [
        ([], "lessons: expected a list of sections, each with a name, got []"),
        ({"copy": {}}, "lessons: expected a list of sections"),
        ([{"start": "x.safetensors"}], "lessons: the name of lesson 1 is None; use letters, digits, _ and -"),
        ([{"name": "a.b"}], "lessons: the name of lesson 1 is 'a.b'; use letters"),
        ([{"name": "a"}, {"name": "a"}], "lessons: two lessons are called 'a'; give each a name of its own"),
        (changed(1, start="langage"), "lessons.blank.start: no lesson 'langage'; did you mean 'language'? valid:"),
        (changed(1, start="copy"), "lessons.blank.start: lesson 'copy' is not before this one; valid: language"),
        (changed(1, start="blank"), "lessons.blank.start: lesson 'blank' is not before this one"),
        (changed(0, start="blank"), "lessons.language.start: lesson 'blank' is not before this one; valid: a"),
        (changed(1, start={"encoder": "langage"}), "lessons.blank.start: no lesson 'langage'; did you mean"),
        (changed(1, start=3), "lessons.blank.start: no lesson 3; valid: language"),
        (changed(1, start=["language"]), "lessons.blank.start: no lesson ['language']"),
        (changed(1, runs_folder="x"), "lessons.blank.runs_folder: a lesson has none of its own"),
        (changed(1, origin={}), "lessons.blank.origin: a lesson has none of its own"),
        (changed(1, trainin={}), "lessons.blank.trainin: unknown key; did you mean 'training'? valid keys here: auto,"),
        (changed(1, strat="a"), "lessons.blank.strat: unknown key; did you mean 'start'?"),
        (changed(1, data={"sequence_lenth": 2}), "lessons.blank: data.sequence_lenth: unknown key; did you mean"),
        (changed(1, training={"init_from": "a.b"}), "start: 'language', but training.init_from is given too; leave"),
        (changed(2, data={"sequence_length": 96}), "lessons.copy: training.batch_tokens 1024 is not a multiple"),
        (changed(2, parallel={"device": None}), "lessons.copy: parallel.device: None, but that of the first"),
    ],
)  # fmt: skip
def test_a_mistake_is_refused_in_one_line(tmp_path, lessons, line):
    assert line in refused(tmp_path, lessons=lessons)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("lessons.cpy.training.steps=3", "no lesson 'cpy'; did you mean 'copy'? valid: language, blank, copy"),
        ("lessons.copy=3", "expected lessons.copy.key.path=value"),
        ("lessons.copy.name=x", "lessons.copy.name: a lesson has none of its own"),
        ("lessons.copy.optimiser.lr=1", "lessons.copy.optimiser: unknown key; did you mean 'optimizer'?"),
        ("name=a/b", "name: String should match pattern"),
        ("trainig.steps=1", "lessons.language: trainig: unknown key; did you mean 'training'?"),
    ],
)
def test_a_wrong_override_is_refused_in_one_line(tmp_path, override, line):
    assert line in refused(tmp_path, override)


class TestStarts:
    """Weights of an earlier lesson are known from its model, before any lesson has begun."""

    @pytest.fixture(scope="class")
    def corpus(self, tmp_path_factory):
        root = tmp_path_factory.mktemp("corpus")
        make_shards(root, (800, 700), name="train", seed=0)
        make_shards(root, (300, 200), name="validation", seed=1)
        return root

    def refused(self, corpus, folder, lessons, *more):
        path = folder / "lessons.yaml"
        tree = run_tree(corpus, folder / "runs", name="school", training={"batch_tokens": 1024})
        path.write_text(yaml.safe_dump({**tree, "lessons": lessons}))
        error = CliRunner().invoke(app, ["train", str(path), *more]).exception
        assert isinstance(error, MegamemError), error
        assert "\n" not in str(error)
        assert not list((folder / "runs").glob("school/*")), "the first lesson has not begun"
        return str(error)

    def test_they_must_fit(self, corpus, tmp_path):
        weights = tmp_path / "runs" / "school" / "1-language" / "model.safetensors"
        line = self.refused(corpus, tmp_path, changed(1, model={"hidden_size": 64}))
        assert line.startswith(f"lessons.blank: {weights}: ")
        assert "has shape [320, 32], the model's is [320, 64]" in line
        line = self.refused(corpus, tmp_path, changed(2, model={"layers": 3}))
        assert line.startswith(f"lessons.copy: {weights.parents[1] / '2-blank' / weights.name}: layers.2.")
        assert line.endswith("is missing; the file belongs to another model")

    def test_they_list_no_new_parameters(self, corpus, tmp_path):
        for more in ([], ["--dry-run"]):
            line = self.refused(corpus, tmp_path, changed(1, training={"freeze": "base"}), *more)
            assert "model.safetensors lists no new parameters, so nothing would learn" in line

    def test_a_file_must_be_there(self, corpus, tmp_path):
        line = self.refused(corpus, tmp_path, changed(1, start="gone.safetensors"))
        assert line.startswith("lessons.blank: gone.safetensors: not a readable safetensors file (")

    def test_the_ranks_of_every_lesson_are_checked(self, corpus, tmp_path):
        line = self.refused(corpus, tmp_path, changed(1, parallel={"dp": 1, "pp": 2}), "--processes", "1")
        assert line.startswith("lessons.blank: parallel: 1 processes cannot be split into TP 1 x PP 2")

    def test_parts_come_from_lessons_too(self, corpus, tmp_path):
        encoder = {"kind": "memory_model", "encoder": {"layers": 1, "hidden_size": 32}, "slots": 4}
        model = {"architecture": encoder, "memory": []}
        lessons = [
            {"name": "first", "model": model},
            {"name": "second", "model": model, "start": {"encoder": "first"}, "training": {"freeze": "encoder"}},
        ]
        path = tmp_path / "parts.yaml"
        tree = run_tree(corpus, tmp_path / "runs", name="school", evaluation={"every": 0})
        path.write_text(yaml.safe_dump({**tree, "lessons": lessons}))
        runs = load_runs(path)
        assert runs[1].training.init_from == {"encoder": runs[0].weights}
        result = CliRunner().invoke(app, ["train", str(path), "--dry-run"])
        assert result.exit_code == 0, result.exception
        assert result.stdout.count("mock step on 1 process") == 2


class TestCommands:
    def run(self, *words):
        return CliRunner().invoke(app, [*map(str, words)])

    def test_plan_has_a_line_for_each_lesson(self, tmp_path):
        out = self.run("plan", write(tmp_path), "--layouts", "--json").stdout
        assert [json.loads(line)["name"] for line in out.splitlines()] == ["1-language", "2-blank", "3-copy"]

    def test_others_want_the_file_of_a_single_run(self, tmp_path):
        path = write(tmp_path)
        study = tmp_path / "study.yaml"
        study.write_text(yaml.safe_dump({"name": "study", "run": path.name, "axes": {"a": {"b": {}}}}))
        with pytest.raises(ConfigError, match="a curriculum, where the file of one run is expected"):
            planned_runs(load_study(study))
        for words in (["launch", path], ["plan", path, "--schedule"], ["verify-resume", path]):
            error = self.run(*words).exception
            assert isinstance(error, ConfigError), words
            assert "a curriculum, where the file of one run is expected; megamem train and megamem plan" in str(error)

    def test_status_of_one_that_has_not_begun(self, tmp_path):
        runs = load_runs(write(tmp_path))
        folder = runs[0].runs_folder
        folder.mkdir(parents=True)
        (folder / FILE).write_text(dump_curriculum(runs))
        assert lesson_folders(folder) == [run.run_folder for run in runs]
        assert [status.condition for status in lesson_statuses(folder)] == ["waiting"] * 3
        assert curriculum_condition(lesson_statuses(folder)) == "waiting"
        assert self.run("status", folder).stdout.count("waiting") == 3

    def test_a_folder_of_a_run_is_left_alone(self, tmp_path):
        runs = load_runs(write(tmp_path))
        runs[0].runs_folder.mkdir(parents=True)
        (runs[0].runs_folder / "config.yaml").touch()
        with pytest.raises(RunFolderError, match="school: holds a run; choose another `name` for the curriculum"):
            next(train_lessons(runs, console=None))


def test_the_curricula_of_the_repository_are_read():
    """Each lesson is a run, and the weights of those that start from others fit, as far as models tell."""
    for path in sorted((ROOT / "configs" / "curricula").glob("*.yaml")):
        lessons = load_runs(path)
        assert len(lessons) > 1
        for lesson in lessons:
            if lesson.training.init_from is not None:
                assert lesson.training.freeze == "encoder"


def test_the_lessons_of_the_comparison_of_copies_have_what_they_compare():
    """Models that are trained at once have as many steps as the autoencoder and the lesson behind it together."""
    lessons = {lesson.lesson: lesson for lesson in load_runs(ROOT / "configs" / "curricula" / "copies_small.yaml")}
    steps = {name: lesson.steps for name, lesson in lessons.items()}
    assert steps["blank_copy"] == steps["autoencode"] + steps["frozen_blank_copy"]
    assert steps["copy"] == steps["autoencode"] + steps["frozen_copy"]
    objectives = {name: lesson.training.objective for name, lesson in lessons.items()}
    for name in ("next_token", "blank_copy", "copy", "combined", "combined_blank"):
        assert objectives[name] == objectives[f"frozen_{name}"]
