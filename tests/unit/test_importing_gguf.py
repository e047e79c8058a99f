"""GGUF files become our models with the same logits, or are refused: never read in part."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megamem.errors import ConversionError
from megamem.hf.source import open_source
from tests.unit.importing_helpers import LENGTH, LLAMA, randomized, theirs

gguf = pytest.importorskip("gguf")

LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
"""llama.cpp's names of what a Llama's layer has."""
HEADS = {"attn_q": LLAMA["num_attention_heads"], "attn_k": LLAMA["num_key_value_heads"]}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return randomized(LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=False)).eval())


def tensors_of(model):
    """The tensors by llama.cpp's names, whose rotations turn neighbouring channels."""
    found = {"token_embd.weight": model.model.embed_tokens, "output_norm.weight": model.model.norm,
             "output.weight": model.lm_head}  # fmt: skip
    for number, layer in enumerate(model.model.layers):
        found |= {f"blk.{number}.{name}.weight": layer.get_submodule(part) for part, name in LAYER.items()}
    tensors = {name: part.weight.detach() for name, part in found.items()}
    for name, tensor in tensors.items():
        if heads := HEADS.get(name.split(".")[-2]):
            tensors[name] = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    return tensors


def write(path, tensors, numbers=()):
    """A GGUF file in FP32. numbers: further fields."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LLAMA["num_hidden_layers"])
    writer.add_context_length(LLAMA["max_position_embeddings"])
    writer.add_embedding_length(LLAMA["hidden_size"])
    writer.add_feed_forward_length(LLAMA["intermediate_size"])
    writer.add_head_count(LLAMA["num_attention_heads"])
    writer.add_head_count_kv(LLAMA["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(LLAMA["rms_norm_eps"])
    writer.add_rope_freq_base(LLAMA["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(LLAMA["vocab_size"])
    for name, number in numbers:
        writer.add_uint32(name, number)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tied", [False, True])
def test_tensors_are_those_of_the_model(tmp_path, model, tied):
    tensors = tensors_of(model)
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
        del tensors["output.weight"]
    opened = open_source(write(tmp_path / "model.gguf", tensors, [("llama.expert_count", 0)]))
    for name, parameter in model.named_parameters():
        assert torch.equal(opened.get(name), parameter), name
    assert opened.unused() == set()
    config = LlamaConfig(**opened.config)
    again = LlamaForCausalLM(config).eval()
    again.load_state_dict({name: opened.get(name) for name in opened.names}, strict=not tied)
    assert config.tie_word_embeddings == tied
    ids = torch.randint(96, (1, LENGTH))
    torch.testing.assert_close(theirs(again, ids), theirs(model, ids))


@pytest.mark.parametrize(
    ("lost", "more", "numbers", "said"),
    [
        ("blk.1.ffn_up.weight", None, [], r"holds nothing for model\.layers\.1\.mlp\.up_proj\.weight"),
        (None, "blk.1.attn_q.bias", [], "holds 31 tensors, of which transformers reads 30 for a llama"),
        (None, None, [("split.count", 3)], "is one of 3 parts; merge them"),
        (None, None, [("llama.expert_count", 8)], "is a mixture of experts"),
    ],
)
def test_files_that_would_be_read_in_part_are_refused(tmp_path, model, lost, more, numbers, said):
    """transformers draws what it does not find, and passes over what it does not know."""
    tensors = tensors_of(model)
    tensors.pop(lost, None)
    if more is not None:
        tensors[more] = torch.zeros(LLAMA["hidden_size"])
    with pytest.raises(ConversionError, match=said):
        open_source(write(tmp_path / "model.gguf", tensors, numbers))
