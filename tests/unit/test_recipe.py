"""`--model FILE`: a recipe with a model file is a run, by every verb that takes a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from megamem.cli.main import app
from megamem.config.recipe import load_run, read_recipe
from megamem.errors import ConfigError
from megamem.study.grid import load_study, planned_runs
from tests.unit.shipped import MODELS, RECIPES, ROOT, model_file, shipped

RECIPE = RECIPES / "memory_caching_760m.yaml"
MODEL = MODELS / "dla" / "dla-760m.yaml"
STUDY = ROOT / "configs" / "studies" / "elastic" / "paper" / "comparison.yaml"
SMALL = {"layers": 1, "hidden_size": 32, "heads": 2, "vocab_size": 64, "chunk_size": 256}


def written(path: Path, tree: dict) -> Path:
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def test_the_file_brings_model_and_name() -> None:
    config = load_run(RECIPE, ["optimizer.lr=0.5"], MODEL)
    assert (config.name, config.optimizer.lr, config.data.sequence_length) == ("dla-760m", 0.5, 4096)
    assert config.model == shipped("dla-760m").model
    assert load_run(RECIPE, ["name=mine", "model.layers=3"], MODEL).name == "mine"
    assert load_run(RECIPE, ["model.layers=3"], MODEL).model.layers == 3


def test_it_replaces_the_recipe_s_own_model_whole(tmp_path: Path) -> None:
    """Nothing of the demo's Elastic Memory is left in a model that does not mention `memory`."""
    model = written(tmp_path / "small.yaml", {"model": SMALL})
    config = load_run(RECIPES / "demo.yaml", ["parallel.tp=1"], model)
    assert config.model.memory == []
    assert config.model.model_dump(include=set(SMALL)) == SMALL
    assert config.name == "small"
    assert load_run(RECIPES / "demo.yaml").model.memory, "a recipe with a model needs no file"


def test_without_a_file_the_recipe_is_as_it_is() -> None:
    assert "name" not in read_recipe(RECIPE)
    with pytest.raises(
        ConfigError, match=r"memory_caching_760m.yaml: model: required, but not given; add --model FILE"
    ):
        load_run(RECIPE)


def test_a_file_with_other_sections_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"demo.yaml: a model file holds a `model:` section and nothing else, got"):
        load_run(RECIPE, model=RECIPES / "demo.yaml")


def test_plan_needs_a_recipe_for_it() -> None:
    result = CliRunner().invoke(app, ["plan", "--model", str(MODEL), "--schedule"])
    assert isinstance(result.exception, ConfigError)
    assert "goes with a configuration" in str(result.exception)


def test_plan_and_launch(tmp_path: Path) -> None:
    arguments = [str(RECIPE), "--model", str(MODEL), f"runs_folder={tmp_path}"]
    planned = CliRunner().invoke(app, ["plan", *arguments, "--schedule", "--json", "training.bptt_chunks=1"])
    assert planned.exit_code == 0, planned.output
    assert json.loads(planned.output)["chunks"] == 2
    launched = CliRunner().invoke(app, ["launch", *arguments, "--on", "slurm", "--dry-run", "processes_per_node=8"])
    assert launched.exit_code == 0, launched.output
    assert "name: dla-760m" in launched.output
    assert "kind: dla" in launched.output


@pytest.mark.parametrize("verb", [["train"], ["start-from", str(MODEL)]], ids=lambda verb: verb[0])
def test_training_processes_get_it_too(verb: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(
        "launchers.local_ranks.run_local", lambda count, arguments: started.append((count, arguments)) or 0
    )
    monkeypatch.setattr("megamem.training.checks.check_run", lambda *_: None)
    monkeypatch.setattr("megamem.training.checks.check_kernels", lambda *_: None)
    monkeypatch.setattr("megamem.training.devices.settle", lambda config, *_, **__: config)
    result = CliRunner().invoke(app, [*verb, str(RECIPE), "--model", str(MODEL), "--processes", "2"])
    assert result.exit_code == 0, result.exception
    ((count, arguments),) = started
    assert count == 2
    assert arguments[:2] == ["train", str(RECIPE)]
    assert arguments[arguments.index("--model") + 1] == str(MODEL)


def test_a_study_names_both(tmp_path: Path) -> None:
    study = {"name": "s", "run": str(RECIPE), "model": str(model_file("dla-760m")), "axes": {"rate": {"low": {}}}}
    (run,) = planned_runs(load_study(written(tmp_path / "study.yaml", study)))
    assert run.config.model == shipped("dla-760m").model
    assert run.name == "low-0"


def test_shipped_files_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their paths are those from a checkout; a study's own paths lead on from there."""
    whole = load_run(RECIPE, model=MODEL)
    runs = planned_runs(load_study(STUDY))
    monkeypatch.chdir(tmp_path)
    assert load_run(RECIPE.relative_to(ROOT), model=MODEL.relative_to(ROOT)) == whole
    assert [run.tree for run in planned_runs(load_study(STUDY.relative_to(ROOT)))] == [run.tree for run in runs]
    with pytest.raises(ConfigError, match=f"{tmp_path}/configs/recipes/demon.yaml: no such configuration file"):
        load_run(Path("configs/recipes/demon.yaml"))


def test_a_file_in_the_working_folder_comes_before_the_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs" / "recipes").mkdir(parents=True)
    own = written(Path("configs/recipes/demo.yaml"), {"model": SMALL})
    assert read_recipe(own) == {"model": SMALL}
