"""The sizes of a model, the part of its shape that `ModelConfig` begins with."""

from __future__ import annotations

from pydantic import PositiveInt

from megamem.config.adaptive import AdaptiveConfig, Cluster
from megamem.config.base import ConfigModel


class SizesConfig(ConfigModel):
    """Sizes of the residual stream, of heads and MLPs, of the vocabulary and of chunks."""

    layers: PositiveInt
    """Number of layers."""
    hidden_size: PositiveInt
    """Width of the residual stream."""
    heads: PositiveInt
    """Number of query heads."""
    kv_heads: PositiveInt | None = None
    """Number of key/value heads (grouped-query attention); as many as `heads` if not given."""
    head_dim: PositiveInt | None = None
    """Width of a head; hidden_size / heads if not given."""
    ffn_size: PositiveInt | None = None
    """Inner width of the MLP; if not given, 8/3 of hidden_size rounded up to a multiple of 64, and 4 times with
    `gelu` or `relu`."""
    vocab_size: PositiveInt = 32_000
    """Tokens that can be read and predicted; the tokenizer may have fewer pieces, never more."""
    padded_vocab_size: PositiveInt | None = None
    """Rows of embedding and head, where vocab_size does not divide by parallel.tp; those beyond are never predicted."""
    adaptive: AdaptiveConfig | None = None
    """Adaptive input and softmax: the vocabulary in clusters by frequency. One table of words if not given."""
    chunk_size: PositiveInt
    """Tokens of one chunk, the unit in which states pass from call to call. Blocks of mechanisms divide it."""

    @property
    def resolved_kv_heads(self) -> int:
        """The number of key/value heads, given or not."""
        return self.kv_heads or self.heads

    @property
    def resolved_head_dim(self) -> int:
        """The width of a head, given or not."""
        return self.head_dim or self.hidden_size // self.heads

    @property
    def state_sizes(self) -> dict[str, int]:
        """The named sizes in which mixers declare the shapes of their states (`TensorSpec`), before any split."""
        return {
            "heads": self.heads,
            "kv_heads": self.resolved_kv_heads,
            "hidden": self.hidden_size,
            "chunk": self.chunk_size,
        }

    @property
    def resolved_padded_vocab_size(self) -> int:
        """The logits of a token, and the rows of an embedding or output head that is no clusters."""
        return self.padded_vocab_size or (self.adaptive.filled(self.vocab_size) if self.adaptive else self.vocab_size)

    @property
    def clusters(self) -> tuple[Cluster, ...]:
        """The clusters of adaptive input and softmax; none where the vocabulary is one table."""
        return self.adaptive.clusters(self.vocab_size, self.hidden_size) if self.adaptive else ()

    @property
    def vocabulary_share(self) -> tuple[str, int]:
        """The field whose number tensor-parallel ranks must divide to share the vocabulary, and that number."""
        if self.adaptive:
            return "adaptive.row_multiple", self.adaptive.row_multiple
        return "vocab_size" if self.padded_vocab_size is None else "padded_vocab_size", self.resolved_padded_vocab_size
