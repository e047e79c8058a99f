"""Small random models of transformers, and ours that were made of them."""

import torch
import yaml
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from megamem.config.load import parse_config
from megamem.config.model import ModelConfig
from megamem.hf.importing import MODEL, WEIGHTS
from megamem.memory.base import Chunk
from megamem.model.stage import build_stage
from megamem.parallel.linears import PlainLinears, initialize_parameters

LENGTH, CHUNK = 48, 16
LLAMA = {
    "vocab_size": 96, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 3,
    "num_key_value_heads": 1, "rms_norm_eps": 1e-5, "initializer_range": 0.2, "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
GPT2 = {
    "vocab_size": 97, "n_embd": 24, "n_layer": 3, "n_head": 4, "n_positions": 48, "initializer_range": 0.2,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


def saved(kind, folder, **changes):
    torch.manual_seed(0)
    config = LlamaConfig(**{**LLAMA, **changes}) if kind == "llama" else GPT2Config(**{**GPT2, **changes})
    model = randomized((LlamaForCausalLM if kind == "llama" else GPT2LMHeadModel)(config).eval())
    model.save_pretrained(folder)
    return model


def randomized(model):
    """The model with vectors like those of a trained one: biases and norms that are not zeros and ones."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    return model


def imported(folder):
    """Our model from what `from_hf` wrote."""
    config = parse_config(ModelConfig, yaml.safe_load((folder / MODEL).read_text())["model"], "test")
    stage = build_stage(config, PlainLinears())
    initialize_parameters(stage, 0)
    stage.load_state_dict(load_file(folder / WEIGHTS), strict=False)
    return stage


def logits(stage, ids):
    """[rows, tokens, vocabulary], read chunk by chunk."""
    rows, size = len(ids), stage.config.chunk_size
    states, parts = stage.initial_states(rows, torch.device("cpu"), torch.float32), []
    with torch.no_grad():
        for begin in range(0, ids.shape[1], size):
            hidden, states, _ = stage(ids.T[begin : begin + size], states, Chunk((begin,) * rows))
            parts.append(stage.logits(hidden))
    return torch.cat(parts).transpose(0, 1)


def theirs(model, ids):
    with torch.no_grad():
        return model(ids).logits
