"""Pretrained models of other architectures become ours, with the same logits; what cannot is refused in one line."""

import json

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GPT2LMHeadModel,
)

from megamem.errors import ConfigError, ConversionError
from megamem.hf.importing import MODEL, WEIGHTS, from_hf
from megamem.memory.base import Chunk
from megamem.pipeline.start_weights import open_weights
from tests.unit.importing_helpers import CHUNK, LENGTH, imported, logits, saved, theirs


@pytest.fixture
def ids():
    return torch.randint(96, (2, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_their_one_table_of_words_becomes_no_clusters(tmp_path, kind):
    saved(kind, tmp_path / "hf")
    with pytest.raises(
        ConversionError, match=rf"model.adaptive does not go with a {kind}, whose embedding is one table"
    ):
        from_hf(tmp_path / "hf", tmp_path / "ours", ["adaptive={cutoffs: [16]}"])


@pytest.mark.parametrize("tied", [False, True])
def test_llama(tmp_path, ids, tied):
    model = saved("llama", tmp_path / "hf", tie_word_embeddings=tied)
    facts = from_hf(tmp_path / "hf", tmp_path / "ours", [f"chunk_size={CHUNK}"])
    stage = imported(tmp_path / "ours")
    assert facts["unused"] == facts["new_parameters"] == []
    assert stage.config.padded_vocab_size == 128, "filled up to a multiple that tensor-parallel sizes divide"
    found = logits(stage, ids)
    torch.testing.assert_close(found[..., :96], theirs(model, ids), rtol=1e-4, atol=1e-4)
    assert found[..., 96:].isneginf().all(), "rows beyond the vocabulary are never predicted"


def test_gpt2(tmp_path, ids):
    model = saved("gpt2", tmp_path / "hf")
    facts = from_hf(tmp_path / "hf", tmp_path / "ours", [f"chunk_size={CHUNK}"])
    stage = imported(tmp_path / "ours")
    assert facts["new_parameters"] == []
    torch.testing.assert_close(logits(stage, ids)[..., :97], theirs(model, ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_local_attention_and_memories_change_nothing_in_the_first_chunk(tmp_path, ids, kind):
    model = saved(kind, tmp_path / "hf")
    memory = "memory=[{layers: [1], mixer: {kind: elastic_memory, order: 8}}]"
    from_hf(tmp_path / "hf", tmp_path / "ours", [f"chunk_size={CHUNK}", "mixer=local_attention", memory])
    found, expected = logits(imported(tmp_path / "ours"), ids), theirs(model, ids)
    size = expected.shape[-1]
    torch.testing.assert_close(found[:, :CHUNK, :size], expected[:, :CHUNK], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found[:, CHUNK:, :size], expected[:, CHUNK:], atol=1e-2)


def test_positions_of_gpt2_begin_again(tmp_path):
    saved("gpt2", tmp_path / "hf")
    from_hf(tmp_path / "hf", tmp_path / "ours", [f"chunk_size={CHUNK}", "mixer=local_attention"])
    ids = torch.randint(97, (1, LENGTH), generator=torch.Generator().manual_seed(1)).repeat(1, 2)
    found = logits(imported(tmp_path / "ours"), ids)
    torch.testing.assert_close(found[:, LENGTH:], found[:, :LENGTH])


@pytest.mark.parametrize("kind", ["infini_attention", "memorizing_attention"])
def test_parameters_of_an_added_memory_are_fresh_and_its_gate_closed(tmp_path, ids, kind):
    """The model computes what it did with attention in the memory's place, up to what a closed gate lets through."""
    saved("llama", tmp_path / "hf")
    local = ["chunk_size=16", "mixer=local_attention"]
    from_hf(tmp_path / "hf", tmp_path / "plain", local)
    facts = from_hf(tmp_path / "hf", tmp_path / "ours", [*local, f"memory=[{{layers: [1], mixer: {kind}}}]"])
    assert facts["new_parameters"] == ["layers.1.mixer.gate.logit"]
    assert open_weights(tmp_path / "ours" / WEIGHTS).new_parameters == {"layers.1.mixer.gate.logit"}
    section = yaml.safe_load((tmp_path / "ours" / MODEL).read_text())["model"]
    assert section["memory"][0]["mixer"]["gate_init"] == -6.0
    before, after = (logits(imported(tmp_path / name), ids)[..., :96] for name in ("plain", "ours"))
    # sigmoid(-6) = 0.25 % of one layer's attention
    assert 0 < (after - before)[:, 16:].abs().max() < 0.02 * before.abs().max()
    assert torch.allclose(after[:, :16], before[:, :16], atol=1e-5)
    from_hf(
        tmp_path / "hf", tmp_path / "open", [*local, f"memory=[{{layers: [1], mixer: {{kind: {kind}, gate_init: 0}}}}]"]
    )
    section = yaml.safe_load((tmp_path / "open" / MODEL).read_text())["model"]
    assert section["memory"][0]["mixer"]["gate_init"] == 0.0


SIGNAL = "basis: 8, widths: [0.1, 0.2], samples: 8"
ADDED = {
    "long_term_memory": f"mixer={{kind: infinity_former, {SIGNAL}}}",
    "sticky_memories": f"mixer={{kind: infinity_former, sticky: random, {SIGNAL}}}",
    "long_term_memory_of_one_layer": f"memory=[{{layers: [1], mixer: {{kind: infinity_former, {SIGNAL}}}}}]",
    "added_delta_net": "mixer={kind: added_memory, memory: {kind: delta_net, decay: true}}",
    "added_elastic_memory": "mixer={kind: added_memory, memory: {kind: elastic_memory, order: 8}}",
    "added_compressive": "memory=[{layers: [1], mixer: {kind: added_memory, memory: compressive_transformer}}]",
    # sigmoid(-30) = 1e-13
    "infini_attention": "memory=[{layers: [1], mixer: {kind: infini_attention, gate_init: -30}}]",
}


@pytest.mark.parametrize(
    ("kind", "added"),
    # recurrent memories have no biases, which a GPT-2 has
    [(kind, added) for kind in ("llama", "gpt2") for added in ADDED if (kind, added) != ("gpt2", "added_delta_net")],
)
def test_a_memory_that_starts_closed_leaves_the_losses_as_they_were(tmp_path, ids, kind, added):
    """In the first chunk the source's own losses, beyond it those of the source with attention within the chunk."""
    model = saved(kind, tmp_path / "hf")
    local = [f"chunk_size={CHUNK}", "mixer=local_attention"]
    from_hf(tmp_path / "hf", tmp_path / "local", local)
    facts = from_hf(tmp_path / "hf", tmp_path / "ours", [*local, ADDED[added]])
    assert facts["new_parameters"]
    assert facts["unused"] == []
    stage = imported(tmp_path / "ours")
    wanted = cross_entropies(theirs(model, ids), ids)
    found = cross_entropies(logits(stage, ids)[..., : model.config.vocab_size], ids)
    # FP32 in another order of sums
    torch.testing.assert_close(found[:, : CHUNK - 1], wanted[:, : CHUNK - 1], rtol=1e-5, atol=1e-5)
    local_losses = cross_entropies(logits(imported(tmp_path / "local"), ids)[..., : model.config.vocab_size], ids)
    torch.testing.assert_close(found, local_losses, rtol=1e-6, atol=1e-6)


def cross_entropies(logits, ids):
    """[rows, tokens - 1] the loss of each token after the first."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(
        len(ids), -1
    )


def test_an_output_that_starts_at_zero_learns(tmp_path, ids):
    """The projection of the long-term memory's output gets a gradient from the first step on, which opens it."""
    saved("gpt2", tmp_path / "hf")
    from_hf(tmp_path / "hf", tmp_path / "ours", [f"chunk_size={CHUNK}", ADDED["long_term_memory"]])
    section = yaml.safe_load((tmp_path / "ours" / MODEL).read_text())["model"]
    assert section["mixer"]["output_init"] == "zero"
    assert section["mixer"]["gate_init"] is None
    stage = imported(tmp_path / "ours")
    output = stage.get_parameter("layers.1.mixer.long_output.weight")
    assert not output.any()
    states = stage.initial_states(len(ids), torch.device("cpu"), torch.float32)
    total = 0.0
    for begin in (0, CHUNK):
        hidden, states, _ = stage(ids.T[begin : begin + CHUNK], states, Chunk((begin,) * len(ids)))
        total = total + stage.token_losses(hidden, ids.T[begin : begin + CHUNK]).sum()
    total.backward()
    assert output.grad.abs().max() > 0


@pytest.mark.parametrize("start", ["gate_init: -4", "output_init: normal"])
def test_a_start_of_the_long_term_memory_that_was_given_is_kept(tmp_path, start):
    saved("llama", tmp_path / "hf")
    mixer = f"mixer={{kind: infinity_former, {SIGNAL}, {start}}}"
    from_hf(tmp_path / "hf", tmp_path / "ours", [f"chunk_size={CHUNK}", mixer])
    section = yaml.safe_load((tmp_path / "ours" / MODEL).read_text())["model"]["mixer"]
    assert section["output_init"] == "normal"
    assert section["gate_init"] == (-4 if "gate" in start else None)


def test_weights_fit_a_transformer_xl(tmp_path):
    saved("gpt2", tmp_path / "hf")
    facts = from_hf(tmp_path / "hf", tmp_path / "ours", [f"chunk_size={CHUNK}", "mixer=transformer_xl"])
    assert facts["unused"] == []
    assert len(facts["new_parameters"]) == 3 * 3, "u, v and the distances of three layers"


@pytest.mark.parametrize(
    ("added", "rows"),
    [
        ("architecture={kind: recurrent_memory, memory_tokens: 2}", ["memory_rows.read", "memory_rows.write"]),
        ("memory=[{layers: [0], mixer: {kind: melodi, form: rising}}]", ["side_rows.weight"]),
    ],
)
def test_rows_beside_the_tokens_are_fresh_parameters(tmp_path, ids, added, rows):
    saved("llama", tmp_path / "hf")
    facts = from_hf(tmp_path / "hf", tmp_path / "ours", [f"chunk_size={CHUNK}", "mixer=local_attention", added])
    outside = [name for name in facts["new_parameters"] if not name.startswith("layers.")]
    assert outside == rows
    stage = imported(tmp_path / "ours")
    assert all(getattr(stage, name.split(".")[0]) is not None for name in rows)
    assert open_weights(tmp_path / "ours" / WEIGHTS).new_parameters == set(facts["new_parameters"])


def test_a_projection_that_is_missing_is_not_drawn_anew(tmp_path):
    saved("llama", tmp_path / "hf")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConversionError, match=r"holds nothing for layers\.1\.mixer\.query\.weight"):
        from_hf(tmp_path / "hf", tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"], "nothing is left behind"


def test_a_head_that_is_not_the_embedding_is_not_tied(tmp_path, ids):
    """transformers takes the head then, whatever the configuration says."""
    model = saved("llama", tmp_path / "hf", tie_word_embeddings=True)
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    for head, said in ((embedding.clone(), None), (embedding + 0.1, "lm_head.weight is not the embedding")):
        save_file({**weights, "lm_head.weight": head}, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
        if said is None:
            assert from_hf(tmp_path / "hf", tmp_path / "ours")["unused"] == []
            torch.testing.assert_close(
                logits(imported(tmp_path / "ours"), ids)[..., :96], theirs(model, ids), rtol=1e-4, atol=1e-4
            )
            continue
        with pytest.raises(ConversionError, match=said):
            from_hf(tmp_path / "hf", tmp_path / "other")


def test_a_head_of_a_gpt2_is_not_lost(tmp_path):
    saved("gpt2", tmp_path / "hf")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    head = weights["transformer.wte.weight"] + 0.1
    save_file({**weights, "lm_head.weight": head}, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConversionError, match=r"tie_word_embeddings is true, but lm_head.weight is not the embedding"):
        from_hf(tmp_path / "hf", tmp_path / "ours")


def test_a_head_cannot_be_tied_by_an_override(tmp_path):
    saved("llama", tmp_path / "hf", tie_word_embeddings=False)
    with pytest.raises(ConversionError, match=r"tie_embeddings=true, but lm_head.weight is not the embedding"):
        from_hf(tmp_path / "hf", tmp_path / "ours", ["tie_embeddings=true"])


def test_words_without_weights_are_refused(tmp_path):
    """Their logits would be zeros, and likelier than most words."""
    saved("llama", tmp_path / "hf")
    with pytest.raises(ConversionError, match=r"embedding.weight has 96 rows, model.vocab_size is 112; .*padded_vocab"):
        from_hf(tmp_path / "hf", tmp_path / "ours", ["vocab_size=112"])
    from_hf(tmp_path / "hf", tmp_path / "ours", ["padded_vocab_size=256"])


@pytest.mark.parametrize(
    "again", ["memory=[]", "memory=[{layers: [2], mixer: {kind: added_memory, memory: elastic_memory}}]"]
)
def test_attention_is_that_of_the_source_where_a_memory_is_taken_away(tmp_path, ids, again):
    saved("llama", tmp_path / "hf")
    local = [f"chunk_size={CHUNK}", "mixer=local_attention"]
    from_hf(tmp_path / "hf", tmp_path / "local", local)
    from_hf(tmp_path / "hf", tmp_path / "ours", [*local, ADDED["added_compressive"]])
    facts = from_hf(tmp_path / "ours", tmp_path / "again", ["mixer=local_attention", again])
    assert all("layers.2.mixer.memory." in name for name in facts["new_parameters"])
    assert all(".mixer.memory." in name for name in facts["unused"])
    torch.testing.assert_close(logits(imported(tmp_path / "again"), ids), logits(imported(tmp_path / "local"), ids))


def test_a_section_that_is_none_is_refused(tmp_path):
    saved("llama", tmp_path / "hf")
    from_hf(tmp_path / "hf", tmp_path / "ours")
    (tmp_path / "ours" / MODEL).write_text("model:\n")
    with pytest.raises(ConversionError, match="its model section is None, no mapping of fields"):
        from_hf(tmp_path / "ours", tmp_path / "again")


def test_quantised_weights_are_refused(tmp_path):
    saved("llama", tmp_path / "hf")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**weights, name: weights[name].to(torch.float8_e4m3fn)}, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(ConversionError, match=r"stored as torch\.float8_e4m3fn; quantised weights are not read"):
        from_hf(tmp_path / "hf", tmp_path / "ours")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, "quantization_config": {"bits": 8}}))
    with pytest.raises(ConversionError, match="hf: quantised weights are not read"):
        from_hf(tmp_path / "hf", tmp_path / "ours")


def test_a_setting_that_is_missing_is_named(tmp_path):
    saved("llama", tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    del config["rms_norm_eps"]
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConversionError, match="its configuration has no rms_norm_eps"):
        from_hf(tmp_path / "hf", tmp_path / "ours")


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("llama", {"attention_bias": True}, "attention_bias True is not supported"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; only 'silu' is"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type 'linear' is not supported; only 'default' and 'llama3' are",
        ),
        ("gpt2", {"activation_function": "relu"}, "activation_function 'relu' is not supported"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True is not supported"),
    ],
)
def test_what_we_do_not_compute_is_refused(tmp_path, kind, changes, said):
    saved(kind, tmp_path / "hf", **changes)
    with pytest.raises(ConversionError, match=said):
        from_hf(tmp_path / "hf", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


class TestBadSources:
    def config(self, folder, **changes):
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    def test_an_unknown_architecture(self, tmp_path):
        saved("llama", tmp_path)
        self.config(tmp_path, model_type="mamba")
        with pytest.raises(
            ConversionError,
            match="architecture 'mamba' is not known; known are gpt2, llama, mistral, qwen2, qwen3, olmo2, megamem",
        ):
            from_hf(tmp_path, tmp_path / "ours")

    def test_a_shape_that_is_not_the_configurations(self, tmp_path):
        saved("llama", tmp_path)
        self.config(tmp_path, intermediate_size=48)
        with pytest.raises(ConversionError, match=r"layers\.0\.mlp\.gate\.weight would have shape \[40, 24\]"):
            from_hf(tmp_path, tmp_path / "ours")

    def test_a_missing_layer(self, tmp_path):
        saved("llama", tmp_path)
        self.config(tmp_path, num_hidden_layers=4)
        with pytest.raises(ConversionError, match=r"holds nothing for layers\.3\.mixer_norm\.weight"):
            from_hf(tmp_path, tmp_path / "ours")

    def test_no_folder(self, tmp_path):
        with pytest.raises(ConversionError, match="no such folder or GGUF file"):
            from_hf(tmp_path / "gone", tmp_path / "ours")

    def test_pickled_weights(self, tmp_path):
        saved("llama", tmp_path)
        (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
        with pytest.raises(ConversionError, match=r"pickled weights only \(pytorch_model\.bin\), which are not read"):
            from_hf(tmp_path, tmp_path / "ours")

    def test_a_truncated_file(self, tmp_path):
        saved("llama", tmp_path)
        path = tmp_path / "model.safetensors"
        path.write_bytes(path.read_bytes()[:100])
        with pytest.raises(ConversionError, match=r"model\.safetensors: cannot be read"):
            from_hf(tmp_path, tmp_path / "ours")

    def test_a_folder_in_use(self, tmp_path):
        saved("llama", tmp_path / "hf")
        (tmp_path / "ours").mkdir()
        with pytest.raises(ConversionError, match="exists already"):
            from_hf(tmp_path / "hf", tmp_path / "ours")

    def test_a_chunk_that_does_not_fit_the_positions(self, tmp_path):
        saved("gpt2", tmp_path / "hf")
        with pytest.raises(ConfigError, match="max_positions 48 is not a multiple of chunk_size 20"):
            from_hf(tmp_path / "hf", tmp_path / "ours", ["chunk_size=20"])

    def test_chunks_fit_any_number_of_positions(self, tmp_path):
        """The largest up to 512 if none is given."""
        saved("gpt2", tmp_path / "hf", n_positions=768)
        for name, given, size in (("default", [], 384), ("given", ["chunk_size=256"], 256)):
            from_hf(tmp_path / "hf", tmp_path / name, given)
            assert imported(tmp_path / name).config.chunk_size == size

    def test_an_unknown_mechanism(self, tmp_path):
        saved("llama", tmp_path / "hf")
        with pytest.raises(ConfigError, match="telepathy"):
            from_hf(tmp_path / "hf", tmp_path / "ours", ["memory=[{layers: [1], mixer: telepathy}]"])


def test_auto_classes_know_what_we_import(tmp_path):
    """The folders above are what transformers itself opens."""
    saved("gpt2", tmp_path)
    assert isinstance(AutoModelForCausalLM.from_pretrained(tmp_path), GPT2LMHeadModel)
