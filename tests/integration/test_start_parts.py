"""A memory model starts from an encoder and a pretrained decoder, trains with one frozen, resumes, is evaluated."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from checkpoints.folder import open_checkpoint
from checkpoints.read import compare
from checkpoints.weights import WeightsHeader, write_weights
from megamem.config.load import load_config
from megamem.config.model import ModelConfig
from megamem.config.run import RunConfig
from megamem.model.stage import build_stage
from megamem.parallel.linears import PlainLinears, initialize_parameters
from megamem.pipeline.start_weights import new_parameters, open_weights, weight_sources
from tests.integration.commands import CHUNK, LENGTH, VOCABULARY, run_tree, write_config
from tests.integration.model_cases import figures, write_tasks
from tests.integration.ranks import Job, command
from tests.integration.test_models import invoke, refused
from tokenization.tokenizer import Tokenizer

pytestmark = pytest.mark.distributed

STOPPED = 75
ENCODER = {"layers": 2, "hidden_size": 16, "heads": 2}


@pytest.fixture(scope="module")
def start(data, tmp_path_factory):
    """Folder with `narrow`, a language model that becomes the encoder, and `llama`, an imported one for the decoder."""
    folder = tmp_path_factory.mktemp("start")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**shape, vocab_size=VOCABULARY, tie_word_embeddings=True)).save_pretrained(
        folder / "hf"
    )
    invoke("convert", "from-hf", folder / "hf", folder / "llama", f"chunk_size={CHUNK}")
    model = ModelConfig.model_validate(
        {**ENCODER, "vocab_size": VOCABULARY, "padded_vocab_size": 384, "chunk_size": CHUNK}
    )
    narrow = build_stage(model, PlainLinears())
    initialize_parameters(narrow, 7)
    weights = {name: parameter.detach() for name, parameter in narrow.named_parameters()}
    tokenizer = Tokenizer.load(data / "tokenizer").vocabulary_hash
    write_weights(weights, folder / "narrow.safetensors", WeightsHeader.of_model(model, tokenizer))
    return folder


def config_file(data, start, folder, **sections):
    """A run of the two, its decoder's shape that of the imported model."""
    files = {"encoder": str(start / "narrow.safetensors"), "decoder": str(start / "llama" / "weights.safetensors")}
    training = {"steps": 4, "freeze": "encoder", "init_from": files, **sections.pop("training", {})}
    tree = run_tree(data, folder / "runs", training=training, logging={"every": 1}, evaluation={"every": 0}, **sections)
    architecture = {"kind": "memory_model", "encoder": ENCODER, "slots": 3, "positions": "variable"}
    tree |= {"base": str(start / "llama" / "model.yaml"), "model": {"layers": 4, "architecture": architecture}}
    return write_config(folder / "run.yaml", tree)


def trained(folder, config, *overrides, code=0):
    """The output of a run of its own process."""
    with Job(folder / f"job-{len(list(folder.iterdir()))}", 1, command, "train", str(config), *overrides) as job:
        assert job.codes(90) == [code], job.output(0) + job.output(0, "err")
        return " ".join(job.output(0, "out").split())


@pytest.fixture(scope="module")
def runs(data, start, tmp_path_factory):
    """Folder with the run `whole`, and `halves`, which was stopped in between; the output of the former."""
    folder = tmp_path_factory.mktemp("runs")
    config = config_file(
        data, start, folder, optimizer={"lr": 1e-3, "new_parameters_lr": 1e-2}, checkpoint={"every": 2}
    )
    output = trained(folder, config, "name=whole")
    trained(folder, config, "name=halves", "training.stop_after=2", code=STOPPED)
    trained(folder, config, "name=halves")
    return folder / "runs", output


def test_what_is_frozen_stays_and_the_rest_learns(data, start, runs, tmp_path):
    config = load_config(RunConfig, config_file(data, start, tmp_path))
    sources, after = weight_sources(config), load_file(runs[0] / "whole" / "model.safetensors")
    assert new_parameters(config) == {"layers.1.writer.projections.0.weight"} == after.keys() - sources.keys()
    for own, (path, name) in sources.items():
        frozen = own.startswith(("encoder_embedding.", "layers.0.", "layers.1."))
        assert torch.equal(load_file(path)[name], after[own]) == frozen, own
    learning = sum(
        value.numel() for name, value in after.items() if not name.startswith(("encoder_", "layers.0.", "layers.1."))
    )
    total = sum(value.numel() for value in after.values())
    assert f"learning: {learning + 512:,} of {total:,} parameters" in runs[1]
    assert "the encoder is frozen" in runs[1]
    # long lines are broken anywhere
    output = runs[1].replace(" ", "")
    assert f"weights:decoder{start / 'llama' / 'weights.safetensors'},encoder{start / 'narrow.safetensors'};" in output
    assert "512parametersarenew" in output


def test_it_resumes_bit_for_bit(runs):
    saved = [open_checkpoint(runs[0] / name / "checkpoints" / "step-00000004") for name in ("whole", "halves")]
    count, differences = compare(*saved)
    assert count > 40
    assert [str(found) for found in differences] == []


def test_its_parts_start_other_models(data, start, runs, tmp_path):
    """The weights say of which parts and tokenizer they are, merged ones too."""
    invoke(
        "checkpoint",
        "merge",
        runs[0] / "whole" / "checkpoints" / "step-00000004",
        "-o",
        tmp_path / "merged.safetensors",
    )
    one, other = open_weights(runs[0] / "whole" / "model.safetensors"), open_weights(tmp_path / "merged.safetensors")
    assert one.parts == other.parts
    assert {name: part.first_layer for name, part in one.parts.items()} == {"encoder": 0, "decoder": 2}
    assert one.tokenizer == other.tokenizer == Tokenizer.load(data / "tokenizer").vocabulary_hash
    file = tmp_path / "merged.safetensors"
    config = config_file(data, start, tmp_path, training={"freeze": "decoder", "init_from": {"decoder": str(file)}})
    assert set(weight_sources(load_config(RunConfig, config))) >= {"layers.2.mlp.up.weight", "norm.weight"}
    assert "is 16 wide, the model's 8; set model.architecture.encoder.hidden_size to 16" in refused(
        "train",
        config,
        "name=narrower",
        f"training.init_from.encoder={file}",
        "model.architecture.encoder.hidden_size=8",
    )
    assert "training.freeze was encoder and is decoder" in refused(
        "train", config, "name=whole", f"runs_folder={runs[0]}", "training.freeze=decoder"
    )


@pytest.mark.slow
def test_it_is_evaluated_before_and_after(data, start, runs, tmp_path):
    """A step at a rate that moves no weight leaves a run of the weights that it started from."""
    config = config_file(data, start, tmp_path, training={"steps": 1}, optimizer={"lr": 1e-30})
    trained(tmp_path, config, "name=before")
    sources = weight_sources(load_config(RunConfig, config))
    before = load_file(tmp_path / "runs" / "before" / "model.safetensors")
    assert all(torch.equal(before[own], load_file(path)[name]) for own, (path, name) in sources.items())
    tasks = ["--tasks", "megamem_rolling", "--include-path", write_tasks(tmp_path / "tasks"), "--max-length", LENGTH]
    losses = [
        json.loads(invoke("evaluate", run, "--json").splitlines()[-1])
        for run in (tmp_path / "runs" / "before", runs[0] / "whole")
    ]
    assert losses[0]["val_loss"] != losses[1]["val_loss"]
    # the decoder reads memories of untrained projections, which are small
    assert losses[0]["val_loss"] == pytest.approx(losses[0]["memory_off_loss"], rel=1e-2)
    # tasks, of the checkpoint and of its export
    invoke("convert", "to-hf", tmp_path / "runs" / "before", tmp_path / "hf", "--evaluation-tokens", 0)
    scores = [
        figures(json.loads(invoke("evaluate", model, *tasks, "--json")))
        for model in (tmp_path / "runs" / "before", tmp_path / "hf")
    ]
    assert scores[0]["megamem_rolling/bits_per_byte,none"] > 1
    assert scores[1] == pytest.approx(scores[0], rel=1e-5)


def test_a_cache_of_embeddings_is_of_the_weights_that_are_computed_with(data, start, tmp_path):
    """A dry run, whose weights are random, leaves nothing in it; a run that goes on does not ask the file again."""
    kept, encoder = tmp_path / "kept", tmp_path / "encoder.safetensors"
    shutil.copy(start / "narrow.safetensors", encoder)
    files = {"encoder": str(encoder), "decoder": str(start / "llama" / "weights.safetensors")}
    training = {"embedding_cache": str(kept), "init_from": files}
    config = config_file(data, start, tmp_path, training=training, checkpoint={"every": 2})
    trained(tmp_path, config, "--dry-run")
    assert not kept.exists()
    trained(tmp_path, config, "training.stop_after=2", code=STOPPED)
    changed = {name: value + 1 for name, value in load_file(encoder).items()}
    write_weights(changed, encoder)
    trained(tmp_path, config)
    assert len(list(kept.iterdir())) == 1
