"""Norms, MLPs and dropout of a model's layers, the part of its shape between `SizesConfig` and `ModelConfig`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megamem.config.sizes import SizesConfig


class LayersConfig(SizesConfig):
    """Norms, MLPs, biases and dropout of every layer."""

    norm: Literal["rms", "layer"] = "rms"
    """RMSNorm, or LayerNorm as GPT-2 has it."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """Added to the mean square in RMSNorm."""
    norm_position: Literal["pre", "post", "output"] = "pre"
    """What a layer normalizes: `pre`, what its mixer and its MLP are given; `output`, what they add to the residual
    stream, as OLMo 2 does; `post`, the residual stream behind each of them, as the first Transformers did. With `post`
    there is no norm in front of the output head."""
    qk_norm: bool | Literal["projection"] = False
    """RMSNorm of each head's query and key of softmax attention, before rotation, with weights that all heads share;
    `projection`: of all heads' numbers together, each with a weight of its own, as OLMo 2 has it."""
    mlp: Literal["swiglu", "gelu", "relu"] = "swiglu"
    """SwiGLU, or two projections with a GELU (tanh form) between them as GPT-2 has it, or a ReLU as Transformer-XL."""
    bias: bool | Literal["query_key_value"] = False
    """Biases in all projections of mixers and MLPs and in layer norms; `query_key_value`: in attention's projections to
    queries, keys and values alone, as Qwen2 has them. They start from zero."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability with which training drops values of embeddings, of what mixers and MLPs add to the residual stream,
    and of the places that docs/training.md names."""
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability with which training drops shares of softmax attention, which no fused kernel then computes."""

    @property
    def all_biases(self) -> bool:
        """Whether MLPs, layer norms and projections of what mixers put out have biases too."""
        return self.bias is True

    @property
    def resolved_ffn_size(self) -> int:
        """The inner width of the MLP, given or not."""
        if self.mlp != "swiglu":
            return self.ffn_size or 4 * self.hidden_size
        return self.ffn_size or -(-(8 * self.hidden_size) // (3 * 64)) * 64

    @property
    def mlp_matrices(self) -> int:
        """The number of weights of one layer's MLP, biases left out."""
        return (3 if self.mlp == "swiglu" else 2) * self.hidden_size * self.resolved_ffn_size

    @property
    def norm_vectors(self) -> int:
        """The number of parameters of one norm."""
        return self.hidden_size * (2 if self.norm == "layer" and self.all_biases else 1)

    @property
    def last_norm_vectors(self) -> int:
        """The number of parameters of the norm in front of the output head; 0 where layers end with one."""
        return 0 if self.norm_position == "post" else self.norm_vectors
