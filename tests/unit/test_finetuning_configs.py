"""The shipped fine-tuning: the commands in its files import what its recipes and its study train."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file
from transformers import GPT2Config, LlamaConfig

from megamem.config.load import load_config, parse_config
from megamem.config.model import ModelConfig
from megamem.config.recipe import load_run
from megamem.config.run import RunConfig
from megamem.hf import importing
from megamem.hf.importing import MODEL, from_hf, source_section
from megamem.hf.source import Source
from megamem.model.stage import meta_stage
from megamem.study.grid import load_study, planned_runs
from tests.unit.shipped import RECIPES, ROOT

STUDY = ROOT / "configs" / "studies" / "infinity"
SOURCES = {
    "gpt2": GPT2Config(),
    "smollm2": LlamaConfig(
        vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e5},
    ),
}  # fmt: skip
"""The configurations of the models that the recipes are for."""


def commands(path: Path, verb: str) -> list[list[str]]:
    """The words of a command in a file's comments, once for each time that it stands there."""
    comments = "\n".join(line[1:] for line in path.read_text().splitlines() if line.startswith("#"))
    found = re.findall(rf"^ +megamem {verb}.*?(?=^ +megamem |^ ?\S|\Z)", comments, re.MULTILINE | re.DOTALL)
    return [shlex.split(command.replace("\\\n", " ")) for command in found]


def imported_model(path: Path, source: Source, kind: str, out: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model file that the import in a file's comments writes, without the weights."""
    ((_, _, _, folder, _, *overrides),) = commands(path, "convert from-hf")
    monkeypatch.setattr(importing, "known_source", lambda source_path: (source, kind))
    monkeypatch.setattr(importing, "collect", lambda *arguments: ({"one": torch.zeros(1)}, []))
    from_hf(Path(folder), out, overrides)
    return out / MODEL


@pytest.mark.parametrize("name", SOURCES)
def test_recipes_train_what_their_commands_import(name, tmp_path, monkeypatch):
    recipe = RECIPES / f"infinity_former_{name}.yaml"
    config = json.loads(SOURCES[name].to_json_string(use_diff=False))
    source = Source(tmp_path, config, {})
    model = imported_model(recipe, source, config["model_type"], tmp_path / "start", monkeypatch)
    (start,) = commands(recipe, "start-from")
    assert start[-2:] == [f"configs/recipes/infinity_former_{name}.yaml", start[-1]]
    run = load_run(recipe, [start[-1], "training.init_from=weights.safetensors"], model)
    memories = [run.model.mixer_at(layer) for layer in range(run.model.layers)]
    memories = [mixer for mixer in memories if mixer.kind == "infinity_former"]
    assert len(memories) == {"gpt2": 12, "smollm2": 10}[name]
    for memory in memories:
        # the paper's appendix C.3: its widths, threshold, KL and share of the old signal; the ridge of its code
        assert (memory.widths, memory.tau, memory.ridge, memory.restart_after) == ((0.005, 0.01), 0.5, 0.5, 2048)
        assert (memory.kl_weight, memory.kl_width, memory.sticky) == (1e-6, 0.05, "random")
        assert memory.basis == memory.samples == run.model.chunk_size
        assert memory.output_init == "zero"
    assert (run.optimizer.lr, run.optimizer.new_parameters_lr) == (5e-5, 2.5e-4)
    assert run.training.freeze == (None if name == "gpt2" else "base")
    if name == "gpt2":
        assert (run.model.vocab_size, run.model.hidden_size, run.model.heads) == (50_257, 768, 12)
        assert (run.model.chunk_size, run.training.batch_tokens, run.data.feeding) == (512, 512, "streams")


def test_an_imported_model_is_the_decoder_of_the_shipped_memory_model(tmp_path, monkeypatch):
    recipe = RECIPES / "copy_smollm2.yaml"
    source = Source(tmp_path, json.loads(SOURCES["smollm2"].to_json_string(use_diff=False)), {})
    imported = imported_model(recipe, source, "llama", tmp_path / "start", monkeypatch)
    plain = parse_config(ModelConfig, yaml.safe_load(imported.read_text())["model"], "imported")
    (words,) = commands(recipe, "train")
    run = load_run(recipe, [], ROOT / words[-1])
    shapes = {name: parameter.shape for name, parameter in meta_stage(run.model).named_parameters()}
    decoder = run.model.architecture.parts(run.model)["decoder"]
    ours = {plain_name: shapes[name] for name in shapes if (plain_name := decoder.plain_name(name))}
    assert ours == {name: parameter.shape for name, parameter in meta_stage(plain).named_parameters()}
    # what shapes do not say
    changes = {"layers": plain.layers, "architecture": plain.architecture, "norm_eps": plain.norm_eps}
    assert run.model.model_copy(update=changes) == plain
    assert run.model.norm_eps == pytest.approx(1e-5, rel=1e-6)
    encoder = sum(shape.numel() for name, shape in shapes.items() if not decoder.plain_name(name))
    assert encoder == 12_204_480
    assert (run.training.freeze, run.training.objective.kind) == ("decoder", "copy")


def test_the_study_trains_what_its_command_imports(tmp_path, monkeypatch):
    base = load_config(RunConfig, STUDY / "finetuning_base.yaml")
    source = Source(tmp_path, {"model_type": "megamem", "megamem": base.model.model_dump(mode="json")}, {})
    ((*_, mixer),) = commands(STUDY / "finetuning.yaml", "convert from-hf")
    monkeypatch.setattr(importing, "known_source", lambda path: (source, "megamem"))
    monkeypatch.setattr(importing, "collect", lambda *arguments: ({"one": torch.zeros(1)}, []))
    from_hf(tmp_path, tmp_path / "start", [mixer])
    imported = yaml.safe_load((tmp_path / "start" / MODEL).read_text())["model"]
    runs = planned_runs(load_study(STUDY / "finetuning.yaml"))
    assert len(runs) == 9
    for run in runs:
        case, model = run.labels["model"], run.config.model
        assert model.mixer.kind == ("local_attention" if case == "no_memory" else "infinity_former")
        assert run.config.training.init_from is not None
        if case == "no_memory":
            assert model == base.model
        if case == "long_term":
            assert model.model_dump(mode="json") == imported
        if case == "sticky":
            assert model.model_dump(mode="json") == {**imported, "mixer": {**imported["mixer"], "sticky": "random"}}


def test_start_from_takes_what_an_import_wrote(tmp_path, monkeypatch):
    """Model and weights of the folder, and its name for the run, unless another is given."""
    from typer.testing import CliRunner

    from megamem.cli import train
    from megamem.cli.main import app

    (tmp_path / "small").mkdir()
    section = source_section(Source(tmp_path, SOURCES["gpt2"].to_dict(), {}), "gpt2")
    (tmp_path / "small" / "model.yaml").write_text(yaml.safe_dump({"model": section}))
    save_file({"one": torch.zeros(1)}, tmp_path / "small" / "weights.safetensors")
    asked = []
    monkeypatch.setattr(train, "train", lambda config, overrides, model, processes: asked.append((overrides, model)))
    for more in ([], ["name=other"]):
        result = CliRunner().invoke(app, ["start-from", str(tmp_path / "small"), "recipe.yaml", *more])
        assert result.exception is None
    weights = f"training.init_from={tmp_path / 'small' / 'weights.safetensors'}"
    assert asked == [
        (["name=small", weights], tmp_path / "small" / "model.yaml"),
        (["name=small", "name=other", weights], tmp_path / "small" / "model.yaml"),
    ]
    result = CliRunner().invoke(app, ["start-from", str(tmp_path), "recipe.yaml"])
    assert "no such weights file" in str(result.exception)
    (tmp_path / "lessons.yaml").write_text("lessons: [{name: first}, {name: second, start: first}]")
    result = CliRunner().invoke(app, ["start-from", str(tmp_path / "small"), str(tmp_path / "lessons.yaml")])
    assert "lessons.yaml: is a curriculum; give `megamem train` lessons.NAME.training.init_from=" in str(
        result.exception
    )
    assert len(asked) == 2
