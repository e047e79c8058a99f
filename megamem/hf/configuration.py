"""The configuration of an exported model: megamem's own model section, and the names other libraries look for."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from megamem.config.load import parse_config
from megamem.config.model import ModelConfig


class MegamemConfig(PreTrainedConfig):
    """`megamem` holds the `model` section of the training configuration; all else is derived from it."""

    model_type = "megamem"
    keys_to_ignore_at_inference = ("past_key_values",)

    megamem: dict[str, Any] | None = None
    vocab_size: int = 0
    hidden_size: int = 0
    num_hidden_layers: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 2048
    """Tokens of a training sequence. No limit: other libraries cut texts to it where nothing else is said."""
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Raise ConfigError naming the field of the model section that is wrong, e.g. an unknown mechanism."""
        if self.megamem is not None:  # transformers makes an empty one to see what the defaults are
            model = self.model
            self.megamem = model.model_dump(mode="json")
            self.vocab_size, self.hidden_size = model.vocab_size, model.hidden_size
            self.num_hidden_layers, self.num_attention_heads = model.layers, model.heads
            self.num_key_value_heads, self.tie_word_embeddings = model.resolved_kv_heads, model.tie_embeddings
        super().__post_init__(**kwargs)

    @property
    def model(self) -> ModelConfig:
        """The model section, validated."""
        return parse_config(ModelConfig, self.megamem or {}, "config.json: megamem")
