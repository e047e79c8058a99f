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
    norm_position: Literal["pre", "post"] = "pre"
    """Where a layer normalizes: what its mixer and its MLP are given, or the residual stream behind each of them as
    the first Transformers did; then there is no norm in front of the output head."""
    qk_norm: bool = False
    """RMSNorm of each query and key of softmax attention, before rotation, with weights that all heads share."""
    mlp: Literal["swiglu", "gelu", "relu"] = "swiglu"
    """SwiGLU, or two projections with a GELU (tanh form) between them as GPT-2 has it, or a ReLU as Transformer-XL."""
    bias: bool = False
    """Biases in all projections of mixers and MLPs and in layer norms; they start from zero."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability with which training drops values of embeddings, of what mixers and MLPs add to the residual stream,
    and of the places that docs/training.md names."""
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability with which training drops shares of softmax attention, which no fused kernel then computes."""

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
        return self.hidden_size * (2 if self.norm == "layer" and self.bias else 1)

    @property
    def last_norm_vectors(self) -> int:
        """The number of parameters of the norm in front of the output head; 0 where layers end with one."""
        return self.norm_vectors if self.norm_position == "pre" else 0
