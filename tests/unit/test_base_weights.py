"""One file of a base for all memories that are added to it, and its own losses beside theirs."""

from __future__ import annotations

import json

import pytest
import tokenizers
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from megamem.cli import recovered_share as verb
from megamem.config.load import parse_config, read_yaml
from megamem.config.run import RunConfig
from megamem.errors import CheckpointError, ConfigError, ConversionError, DataError
from megamem.evaluation.evaluator import Evaluator
from megamem.hf.imported import base_of, like, open_imported
from megamem.hf.importing import MODEL, WEIGHTS, from_hf
from megamem.hf.task_model import tokenizer_of
from megamem.hf.trained import open_trained
from megamem.pipeline.start_weights import new_parameters, open_weights, weight_sources
from megamem.training import held_out
from tests.unit.evaluation_helpers import document
from tests.unit.importing_helpers import LLAMA, randomized, saved
from tests.unit.test_run_config import config
from tokenization.importing import import_tokenizer

CHUNK = 8
MIXER = "{kind: added_memory, memory: {kind: delta_net, convolution: 1}}"
FURTHER = "{kind: memory_caching, segment: 8, memory: {kind: delta_net, expand_v: 2, inner_chunk: 8}}"


@pytest.fixture
def imports(tmp_path):
    """Folder of a plain import and of imports with memories."""
    saved("llama", tmp_path / "hf", vocab_size=32)
    local = [f"chunk_size={CHUNK}", "mixer=local_attention"]
    from_hf(tmp_path / "hf", tmp_path / "plain", local)
    from_hf(tmp_path / "hf", tmp_path / "delta", [*local, f"memory=[{{layers: [1], mixer: {MIXER}}}]"])
    added = f"{{kind: added_memory, memory: {FURTHER}}}"
    from_hf(tmp_path / "hf", tmp_path / "cached", [*local, f"memory=[{{layers: [0, 2], mixer: {added}}}]"])
    from_hf(tmp_path / "hf", tmp_path / "infini", [*local, "mixer=infini_attention"])
    return tmp_path


def test_an_added_memory_starts_with_the_queries_keys_and_values_of_the_attention(tmp_path):
    """They are new parameters all the same, which learn where the base is frozen. Of other shapes, they are drawn."""
    saved("llama", tmp_path / "hf")
    memory = "{kind: memory_caching, segment: 8, memory: {kind: delta_net, expand_v: 2, inner_chunk: 8}}"
    mixer = f"mixer={{kind: added_memory, memory: {memory}}}"
    from_hf(tmp_path / "hf", tmp_path / "ours", [f"chunk_size={CHUNK}", mixer])
    from_hf(tmp_path / "hf", tmp_path / "plain", [f"chunk_size={CHUNK}"])
    ours, plain = (load_file(tmp_path / name / WEIGHTS) for name in ("ours", "plain"))
    new = open_weights(tmp_path / "ours" / WEIGHTS).new_parameters
    for part in ("query", "key"):
        name = f"layers.1.mixer.memory.memory.{part}.weight"
        assert name in new
        assert torch.equal(ours[name], plain[f"layers.1.mixer.{part}.weight"])
    assert "layers.1.mixer.memory.memory.value.weight" in new - ours.keys()
    assert "layers.1.mixer.memory.memory.output.weight" in new - ours.keys()
    assert not any(".attention." in name for name in new)
    assert torch.equal(ours["layers.1.mixer.attention.output.weight"], plain["layers.1.mixer.output.weight"])


def test_norms_of_queries_and_keys_start_as_the_attention_s_too(tmp_path):
    torch.manual_seed(0)
    randomized(Qwen3ForCausalLM(Qwen3Config(**LLAMA, head_dim=8))).save_pretrained(tmp_path / "hf")
    mixer = "mixer={kind: added_memory, memory: elastic_memory}"
    from_hf(tmp_path / "hf", tmp_path / "ours", [f"chunk_size={CHUNK}", mixer])
    weights = load_file(tmp_path / "ours" / WEIGHTS)
    new = open_weights(tmp_path / "ours" / WEIGHTS).new_parameters
    for part in ("query_norm", "key_norm"):
        name = f"layers.1.mixer.memory.{part}.weight"
        assert name in new
        assert torch.equal(weights[name], weights[f"layers.1.mixer.attention.{part}.weight"])
        assert not torch.equal(weights[name], torch.ones_like(weights[name]))


def test_a_memory_is_added_to_what_was_imported(tmp_path):
    """From a plain import comes the same as from its source: weights, new parameters and tokenizer."""
    saved("llama", tmp_path / "hf")
    save_tokenizer(tmp_path / "hf")
    added = [f"chunk_size={CHUNK}", "mixer={kind: added_memory, memory: delta_net}"]
    from_hf(tmp_path / "hf", tmp_path / "plain")
    direct, later = (from_hf(tmp_path / name, tmp_path / f"{name}-memory", added) for name in ("hf", "plain"))
    assert {**direct, "architecture": "imported"} == later
    ours, theirs = (load_file(tmp_path / f"{name}-memory" / WEIGHTS) for name in ("hf", "plain"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    ours, theirs = (open_weights(tmp_path / f"{name}-memory" / WEIGHTS) for name in ("hf", "plain"))
    assert ours.tokenizer == theirs.tokenizer is not None
    assert ours.new_parameters == theirs.new_parameters


def save_tokenizer(folder, end="</s>"):
    """A tokenizer of 96 tokens."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(95)} | {end: 95}, "w0"))
    words.save(str(folder / "tokenizer.json"))


def test_an_import_is_asked_with_its_own_tokenizer(tmp_path):
    saved("llama", tmp_path / "hf")
    save_tokenizer(tmp_path / "hf")
    from_hf(tmp_path / "hf", tmp_path / "plain")
    opened = open_trained(tmp_path / "plain")
    assert tokenizer_of(opened).eos_id == 95
    assert opened.config.data.tokenizer is None, "held-out text names its own, to whose file shards are bound"
    # and not with that of a run whose tokens are others
    save_tokenizer(tmp_path, "<end>")
    import_tokenizer(tmp_path / "tokenizer.json", tmp_path / "theirs", "<end>")
    run = opened.config.model_copy(
        update={"data": opened.config.data.model_copy(update={"tokenizer": tmp_path / "theirs"})}
    )
    with pytest.raises(CheckpointError, match=r"trained with the tokenizer \w+, that of data.tokenizer is \w+"):
        like(tmp_path / "plain", run, [])


def test_the_end_of_documents_can_be_named(tmp_path):
    saved("llama", tmp_path / "hf")
    save_tokenizer(tmp_path / "hf", "<the end>")
    with pytest.raises(DataError, match="--eos"):
        from_hf(tmp_path / "hf", tmp_path / "ours")
    from_hf(tmp_path / "hf", tmp_path / "ours", eos="<the end>")
    with pytest.raises(ConversionError, match="--eos w3: there is no tokenizer to import whose documents end so"):
        from_hf(tmp_path / "ours", tmp_path / "later", eos="w3")
    assert tokenizer_of(open_trained(tmp_path / "ours")).eos_id == 95


def test_gates_of_an_added_memory_stay_open(tmp_path):
    """Its output starts at zero: closed gates inside would only keep it from learning."""
    saved("llama", tmp_path / "hf")
    for name, start, gate in (("closed", "", 0.0), ("given", ", output_init: normal", -6.0)):
        mixer = f"mixer={{kind: added_memory, memory: infini_attention{start}}}"
        from_hf(tmp_path / "hf", tmp_path / name, [f"chunk_size={CHUNK}", mixer])
        section = yaml.safe_load((tmp_path / name / MODEL).read_text())["model"]["mixer"]
        assert section["memory"]["gate_init"] == gate
        assert section["output_init"] == ("normal" if start else "zero")


def run_of(folder, init_from, **sections):
    model = read_yaml(folder / MODEL)["model"]
    return config(
        model=model, data={"sequence_length": 2 * CHUNK, "validation": ["held-out"]},
        training={"batch_tokens": 2 * CHUNK, "init_from": init_from, **sections.pop("training", {})}, **sections,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["plain", "delta", "cached", "infini"])
def test_a_base_gives_what_an_import_of_the_memory_gives(imports, name):
    """The same tensors for the same parameters, and the same new ones."""
    base = run_of(imports / name, {"base": str(imports / "plain" / WEIGHTS)})
    assert new_parameters(base) == open_weights(imports / name / WEIGHTS).new_parameters
    weights, wanted = load_file(imports / "plain" / WEIGHTS), load_file(imports / name / WEIGHTS)
    sources = weight_sources(base)
    assert sources.keys() == wanted.keys()
    assert all(torch.equal(weights[their], wanted[own]) for own, (_, their) in sources.items())


def test_memories_of_a_base_that_are_not_trained_yet_are_new(imports):
    """Copies of the attention's projections lie in the file of an import, and learn wherever it is started from."""
    file = imports / "delta" / WEIGHTS
    assert {name for name in open_weights(file).new_parameters if name in load_file(file)}, "copies"
    wanted = new_parameters(run_of(imports / "delta", str(file)))
    assert new_parameters(run_of(imports / "delta", {"base": str(file)})) == wanted


def test_a_memory_that_nothing_can_close_is_refused(imports):
    """Its layers would not compute what the pretrained model did."""
    added = "memory=[{layers: [1], mixer: {kind: added_memory, memory: FORM}}]"
    with pytest.raises(ConfigError, match="added_memory: masked_mixer has no projection of its own back"):
        from_hf(imports / "hf", imports / "flat", ["chunk_size=8", added.replace("FORM", "masked_mixer")])
    headed = added.replace("FORM", "{kind: masked_mixer, form: headed}")
    from_hf(imports / "hf", imports / "headed", ["chunk_size=8", headed])


def test_a_base_that_does_not_fit_is_refused(imports):
    file = imports / "part.safetensors"
    weights = load_file(imports / "plain" / WEIGHTS)

    def refused(changed, said, name="delta"):
        save_file(changed, file)
        with pytest.raises(CheckpointError, match=said):
            weight_sources(run_of(imports / name, {"base": str(file)}))

    lacking = {key: value for key, value in weights.items() if key != "layers.1.mixer.output.weight"}
    refused(lacking, r"layers.1.mixer.output.weight is missing")
    lacking = {key: value for key, value in weights.items() if key != "layers.2.mlp.up.weight"}
    refused(lacking, r"layers.2.mlp.up.weight is missing")
    other = {**weights, "layers.0.mlp.up.weight": torch.zeros(3, 3)}
    refused(other, r"layers.0.mlp.up.weight has shape \[3, 3\]")
    refused(
        load_file(imports / "infini" / WEIGHTS) | {"layers.0.mixer.gate.logit": torch.zeros(3)}, "is not in the model"
    )
    with pytest.raises(ConfigError, match=r"training.init_from.encoder: the model has no such part"):
        run_of(imports / "delta", {"base": "x", "encoder": "x"})


@pytest.fixture
def texts(monkeypatch):
    # to a model of random weights, which reading farther happens to help here
    found = [document(length, 20 + i) for i, length in enumerate((50, 19, 32, 40))]
    monkeypatch.setattr(held_out, "held_out_documents", lambda run: found)
    return found


def test_local_and_full_attention_of_a_run_are_those_of_its_base(imports, texts):
    wanted = {
        kind: Evaluator(open_trained(imports / "plain", [f"model.mixer={kind}"]).load()).losses(texts).loss
        for kind in ("local_attention", "full_attention")
    }
    assert wanted["local_attention"] != wanted["full_attention"]
    for files in (str(imports / "delta" / WEIGHTS), {"base": str(imports / "plain" / WEIGHTS)}):
        run = run_of(imports / "delta", files, training={"freeze": "base"})
        for kind, loss in wanted.items():
            assert Evaluator(base_of(run, kind, "runs/x").load()).losses(texts).loss == pytest.approx(loss, rel=1e-6)
    assert like(imports / "plain", run, []).config.data == run.data
    with pytest.raises(ConfigError, match=r"runs/x: began from no weights .*; give --local and --full"):
        base_of(config(), "full_attention", "runs/x")


def test_an_import_that_starts_closed_recovers_nothing(imports, texts, capsys):
    """The command on an import, untrained: local attention itself, whose share is 0, and cached keys."""
    out, overrides = imports / "out", ["data.validation=[held-out]"]
    verb.recovered_share(imports / "delta", out, overrides, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((out / "recovered_share.json").read_text())
    # FP32, whose rounding is divided by the gap
    assert found["recovered_share"] == pytest.approx(0.0, abs=1e-4)
    total = found["beyond_first_chunk"]
    assert total["tokens"] == sum(text.predicted_tokens - CHUNK for text in texts)
    plain = Evaluator(open_imported(imports / "plain", overrides).load()).losses(texts)
    assert total["local_loss"] == pytest.approx(plain.beyond_first_chunk_loss, rel=1e-6)
    for names in ({"local": imports / "plain"}, {"full": imports / "nothing.json"}):
        full = {"full": imports / "plain", **names} if "local" in names else names
        with pytest.raises(Exception, match=r"there is no gap|nothing.json: missing"):
            verb.recovered_share(imports / "delta", imports / "other", overrides, **full, as_json=True)


def test_an_import_is_evaluated_by_its_path(imports, texts):
    found = open_trained(imports / "plain", ["data.validation=[held-out]", "evaluation.rows=3"])
    assert isinstance(found.config, RunConfig)
    assert (found.config.evaluation.rows, found.title) == (3, "plain")
    assert parse_config(RunConfig, found.config.model_dump(mode="json"), "again") == found.config
    (imports / "plain" / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match="no such weights file"):
        open_trained(imports / "plain")
