"""Tensor names of native Hugging Face architectures beside ours."""

from __future__ import annotations

import re
from collections.abc import Mapping

from megamem.config.model import ModelConfig

PREFIX = "model."
"""Of all parameters in an export of our own architecture."""

LLAMA = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "layers.#.mixer_norm.weight": "model.layers.#.input_layernorm.weight",
    "layers.#.mlp_norm.weight": "model.layers.#.post_attention_layernorm.weight",
    "layers.#.mixer.query.weight": "model.layers.#.self_attn.q_proj.weight",
    "layers.#.mixer.key.weight": "model.layers.#.self_attn.k_proj.weight",
    "layers.#.mixer.value.weight": "model.layers.#.self_attn.v_proj.weight",
    "layers.#.mixer.output.weight": "model.layers.#.self_attn.o_proj.weight",
    "layers.#.mlp.gate.weight": "model.layers.#.mlp.gate_proj.weight",
    "layers.#.mlp.up.weight": "model.layers.#.mlp.up_proj.weight",
    "layers.#.mlp.down.weight": "model.layers.#.mlp.down_proj.weight",
}
"""Our name -> Llama's; # stands for the layer. Mistral has the same."""
SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_positions": "original_max_position_embeddings",
}
"""Our fields of `rope_scaling` -> those of transformers' `llama3` form."""
QWEN2 = LLAMA | {
    f"layers.#.mixer.{ours}.bias": f"model.layers.#.self_attn.{theirs}.bias"
    for ours, theirs in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"))
}
QWEN3 = LLAMA | {
    "layers.#.mixer.query_norm.weight": "model.layers.#.self_attn.q_norm.weight",
    "layers.#.mixer.key_norm.weight": "model.layers.#.self_attn.k_norm.weight",
}
OLMO2 = QWEN3 | {
    "layers.#.mixer_norm.weight": "model.layers.#.post_attention_layernorm.weight",
    "layers.#.mlp_norm.weight": "model.layers.#.post_feedforward_layernorm.weight",
}


def is_llama(model: ModelConfig) -> bool:
    """Whether transformers' own Llama computes the same function: full attention over all tokens in every layer."""
    plain = (model.norm, model.mlp, model.bias, model.positions) == ("rms", "swiglu", False, "rotary")
    return (
        plain
        and not (model.qk_norm or model.scale_embedding)
        and model.norm_position == "pre"
        and model.architecture.kind == "decoder"
        and model.adaptive is None
        and model.score_scale == model.logit_scale == 1.0
        and model.resolved_padded_vocab_size == model.vocab_size
        and model.hidden_size % model.heads == 0  # transformers wants it, whatever the width of heads
        and all(
            (mixer := model.mixer_at(layer)).kind == "full_attention" and getattr(mixer, "max_chunks", None) is None
            for layer in range(model.layers)
        )
    )


def renamed(name: str, table: Mapping[str, str]) -> str | None:
    """`name` in the other library; None if it has nothing like it."""
    layer = re.search(r"(?<=layers\.)\d+(?=\.)", name)
    pattern = name if layer is None else f"{name[: layer.start()]}#{name[layer.end() :]}"
    found = table.get(pattern)
    return found if found is None or layer is None else found.replace("#", layer[0])
