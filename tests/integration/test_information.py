"""`megamem probe information`: a decoder behind a trained model, which stays as it is; its report; odd input."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from megamem.config.model import ModelConfig
from megamem.evaluation.information import encoder_of, entropy_ratio
from tests.integration.commands import CHUNK, VOCABULARY, finish, megamem, run_tree, torchrun, write_config

pytestmark = pytest.mark.distributed


def run(*arguments, code=0, **options):
    found, out, err = finish(megamem(*map(str, arguments), **options))
    assert found == code, err
    return out if code == 0 else err


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """Folder of a run of four steps, in an order that the decoder which probes it cannot have."""
    folder = tmp_path_factory.mktemp("trained")
    tree = run_tree(data, folder / "runs", training={"steps": 4, "window_order": "layers"}, evaluation={"every": 2})
    run("train", write_config(folder / "run.yaml", tree), "--processes", 1)
    return folder / "runs" / "run"


def test_a_decoder_is_trained_behind_a_frozen_model_and_reports_what_it_tells(trained):
    words = ["probe", "information", trained, "training.steps=3", "--processes", 1, "--json"]
    report = json.loads(run(*words).splitlines()[-1])
    folder = trained / "probes" / "information-step-4"
    assert report == json.loads((folder / "information.json").read_text())
    result = json.loads((folder / "result.json").read_text())
    assert report["loss"] == result["val_loss"]
    assert report["entropy_ratio"] == pytest.approx(1 - report["loss"] / math.log(VOCABULARY))
    assert (report["vocabulary"], report["chunk_size"], report["embedding_size"]) == (VOCABULARY, CHUNK, 32)
    assert [point[0] for point in report["curve"]] == [2 * 4 * 128]
    assert (folder / "information.png").read_bytes()[:4] == b"\x89PNG"
    # the encoder is the model, bit for bit: its embedding, layers and last norm
    own, probe = load_file(trained / "model.safetensors"), load_file(folder / "model.safetensors")
    names = {"embedding.weight": "encoder_embedding.weight", "norm.weight": "layers.1.writer.norm.weight"}
    kept = {names.get(name, name): value for name, value in own.items() if name != "head.weight"}
    assert all(torch.equal(value, probe[name]) for name, value in kept.items())
    # it has ended, and is not trained again
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert json.loads(run(*words).splitlines()[-1]) == report
    assert (folder / "model.safetensors").stat().st_mtime_ns == written


@pytest.mark.slow
def test_start_weights_are_looked_into_for_comparison_and_two_ranks_do_it_too(trained, tmp_path):
    words = ["probe", "information", trained, "training.steps=2", "--untrained", "--json", "--out", tmp_path / "probe"]
    report = json.loads(run(*words, launcher=torchrun(2)).splitlines()[-1])
    assert 0 < report["entropy_ratio"] < 1
    start, own = load_file(tmp_path / "probe.encoder.safetensors"), load_file(trained / "model.safetensors")
    assert start.keys() == own.keys()
    # near them, but not them
    moved = max(float((start[name] - own[name]).abs().max()) for name in own)
    assert 1e-5 < moved < 0.1


@pytest.mark.slow
def test_an_imported_model_needs_a_recipe_for_the_decoder(data, tmp_path):
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama = LlamaConfig(**shape, vocab_size=VOCABULARY, tie_word_embeddings=True)
    LlamaForCausalLM(llama).save_pretrained(tmp_path / "hf")
    folder = tmp_path / "llama"
    run("convert", "from-hf", tmp_path / "hf", folder, f"chunk_size={CHUNK}")
    assert "llama: has no data to train a decoder on; add --recipe" in run("probe", "information", folder, code=2)
    recipe = write_config(tmp_path / "run.yaml", run_tree(data, tmp_path / "runs", training={"steps": 2}))
    words = ["--recipe", recipe, "--decoder-layers", 1, "--token", "last_but_one", "--processes", 1, "--json"]
    report = json.loads(run("probe", "information", folder, *words).splitlines()[-1])
    assert report["embedding_size"] == 32
    found = load_file(folder / "probes" / "information" / "model.safetensors")
    assert torch.equal(found["encoder_embedding.weight"], load_file(folder / "weights.safetensors")["embedding.weight"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "nowhere"),
        (["RUN", "--token", "third"], "embedded_token: should be 'last' or 'last_but_one' (got 'third')"),
        (["RUN", "training.stesp=2"], "training.stesp: unknown key; did you mean 'steps'?"),
        (["RUN", "--tokens", "20"], "block 8 does not divide"),
    ],
)
def test_odd_input_is_one_line(trained, words, said, tmp_path):
    given = [str(trained) if word == "RUN" else word for word in words]
    error = run("probe", "information", *given, "--out", tmp_path / "probe", code=2 if words[0] == "RUN" else 8)
    assert said in error
    assert error.count("\n") == 1, error


def test_the_encoder_of_a_model_with_several_mixers_has_them_too():
    model = ModelConfig.model_validate(
        {
            "layers": 3, "hidden_size": 32, "heads": 4, "kv_heads": 2, "vocab_size": 64, "chunk_size": 8,
            "memory": [{"layers": [1], "mixer": {"kind": "elastic_memory", "order": 8, "block": 8}}],
        }
    )  # fmt: skip
    shape = {**model.model_dump(exclude={"architecture", "memory"}), "layers": 4}
    made = ModelConfig.model_validate(
        {**shape, "architecture": {"kind": "autoencoder", "encoder": encoder_of(model, "model")}}
    )
    assert [made.mixer_at(layer) for layer in range(3)] == [model.mixer_at(layer) for layer in range(3)]
    assert made.layer_model(0).resolved_kv_heads == 2


def test_the_entropy_ratio_is_the_share_of_the_largest_entropy_that_is_told():
    assert entropy_ratio(math.log(512), 512) == pytest.approx(0.0)
    assert entropy_ratio(0.0, 512) == 1.0
    # the paper's second row: a loss of 0.292 of 9.03 nats
    assert entropy_ratio(0.292, 8350) == pytest.approx(0.968, abs=5e-4)
