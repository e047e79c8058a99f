"""Small layers of Memory Caching in float64, and their inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megamem.config.load import parse_config
from megamem.config.model import ModelConfig
from megamem.parallel.linears import PlainLinears, initialize_parameters

CHUNK, ROWS = 16, 2
LINEAR = {"kind": "linear_attention", "inner_chunk": 4}
TITANS = {"kind": "titans", "inner_chunk": 4, "expansion": 2, "max_rate": 0.02}


def model_of(mixer: dict[str, Any], layers: int = 1) -> ModelConfig:
    """A model of 16 channels in four heads, two of them for keys and values."""
    tree = {
        "layers": layers, "hidden_size": 16, "heads": 4, "kv_heads": 2, "vocab_size": 32, "chunk_size": CHUNK,
        "init_std": 0.3, "norm_eps": 1e-30, "mixer": mixer,
    }  # fmt: skip
    return parse_config(ModelConfig, tree, "test")


def built(mixer: dict[str, Any]) -> Any:
    """The mixer of the model's first layer."""
    model = model_of(mixer)
    made = model.mixer_at(0).build(model, PlainLinears(), 0)
    initialize_parameters(made, 1)
    return made.double()


def hidden(tokens: int) -> Tensor:
    """Hidden states [tokens, ROWS, 16]."""
    return torch.randn(tokens, ROWS, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
