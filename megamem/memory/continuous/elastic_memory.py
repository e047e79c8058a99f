"""Elastic Memory: the history of keys and values as HiPPO-LegS coefficients, read by polynomial sampling.

"Towards Compressive and Scalable Recurrent Memory" (Elastic Memory), equations 5 to 10 and algorithm 1. With C the
coefficients, F the keys and values of a block, and matrices P, K and R that depend on the position alone

    read     K_mem, V_mem = R C, memory tokens in front of the block                         (equation 8)
    write    C <- P C + K F                                                                  (equation 6)
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor

from megamem.config.cost import Flops, attention_flops, fixed_product
from megamem.config.model import MIXERS, MixerConfig, ModelConfig
from megamem.memory.base import State, StateSpec, TensorSpec, state_dtype, to_device
from megamem.memory.continuous.hippo import Sampling
from megamem.memory.continuous.hippo_bank import Discretization, HippoBank
from megamem.memory.shared.block_attention import BlockAttention, local_attention_flops, open_specs, resolve_block
from megamem.memory.shared.blocks import BlockSlice
from megamem.ops.attention.softmax import Past
from megamem.parallel.linears import Linears

FORWARD_ORDER = 40
"""Largest order at which the forward rule's first block, whose parts grow as 2^order, keeps half of the digits."""


@MIXERS.register
class ElasticMemoryConfig(MixerConfig):
    """HiPPO-LegS memory of keys and values in front of block-local attention; no parameters of its own."""

    kind: Literal["elastic_memory"] = "elastic_memory"
    """`elastic_memory`"""
    block: PositiveInt | None = None
    """Tokens compressed at once and attended locally; the chunk if not given. Divides model.chunk_size."""
    order: PositiveInt = 540
    """Number N of Legendre coefficients per channel of keys and values (the paper's 1x)."""
    samples: PositiveInt | None = None
    """Memory tokens reconstructed per block; as many as `points`, or min(order, 512), if not given."""
    sampling: Sampling = "exponential"
    """Where in the history the memory tokens lie: evenly, denser towards the present, or at `points`."""
    points: tuple[Annotated[float, Field(ge=0, le=1)], ...] = ()
    """Sampling points of `custom`, as fractions of the history: 0 is the oldest token and 1 the present."""
    alpha: float | None = Field(default=None, gt=0, lt=1)
    """Base of exponential sampling; t^(-1/(samples-1)) if not given, which puts the newest sample one token back."""
    sample_offset: float = Field(default=0.0, ge=0, le=1)
    """Added to sampling points in tokens: 0 is the paper's left edge, 0.5 the middle, far more accurate."""

    discretization: Discretization = "zoh"
    """Rule by which tokens enter the state: zoh (exact for tokens held constant), or an approximate one, for study."""
    first_token: Literal[0, 1] = 0
    """Time of a document's first token: 0 as in the paper's equations; 1 as in HiPPO's code and the paper's Table 12, \
    where the signal is 0 from time 0 to 1."""

    @model_validator(mode="after")
    def _fits(self) -> ElasticMemoryConfig:
        if self.sampling == "exponential" and self.samples == 1:
            raise ValueError("samples 1 with sampling exponential: the newest point needs a second one; use uniform")
        if (self.sampling == "custom") != bool(self.points):
            raise ValueError(
                f"sampling {self.sampling} with {len(self.points)} points: custom takes points, others none"
            )
        if self.points and self.samples not in (None, len(self.points)):
            raise ValueError(f"samples {self.samples} with {len(self.points)} points: leave samples out")
        return self

    @property
    def sample_count(self) -> int:
        """Number of memory tokens per block."""
        return len(self.points) or self.samples or min(self.order, 512)

    def check(self, model: ModelConfig) -> None:
        """See `MixerConfig.check`."""
        block = resolve_block(self.block, model)
        if self.discretization == "forward" and (self.order > FORWARD_ORDER or self.order > block):
            raise ValueError(
                f"discretization forward diverges until it has seen as many tokens as its order: order {self.order} "
                f"must be at most {min(FORWARD_ORDER, block)} (block {block}); or use zoh, backward or bilinear"
            )

    def state_specs(self, model: ModelConfig) -> StateSpec:
        """Declare the coefficients of keys (index 0) and values (1), and the open block."""
        shape = ("batch", self.order, 2, "kv_heads", model.resolved_head_dim)
        return {"coefficients": TensorSpec(shape, "float32", shard="kv_heads"), **open_specs(model)}

    def query_key_norms(self) -> int:
        """See `MixerConfig.query_key_norms`."""
        return 1

    def mixing_flops(self, model: ModelConfig, sequence_length: int, causal: bool) -> dict[str, Flops]:
        """See `MixerConfig.mixing_flops`.

        Counted are P C and K F of each block, R C and attention to the samples of each block but the first. P, K and R
        are constant. The last block's state is read by nobody, the first block's P C starts from zeros: neither has a
        gradient (for a window that spans the sequence).
        """
        block = resolve_block(self.block, model)
        channels = 2 * model.resolved_kv_heads * model.resolved_head_dim
        blocks = -(-sequence_length // block)
        recalling = (blocks - 1) / blocks
        carried = max(blocks - 2, 0) / blocks
        per_coefficient = 2 * channels * self.order / block
        return {
            **local_attention_flops(block, model, sequence_length, causal),
            "memory_attention": attention_flops(model.heads, model.resolved_head_dim, self.sample_count * recalling),
            "memory_update": Flops(
                per_coefficient * (self.order + block), per_coefficient * (self.order * carried + block * recalling)
            ),
            "memory_retrieval": fixed_product(per_coefficient * self.sample_count * recalling),
        }

    def build(self, model: ModelConfig, linears: Linears, layer: int) -> ElasticMemory:
        """See `MixerConfig.build`."""
        return ElasticMemory(self, model, linears)


class ElasticMemory(BlockAttention):
    """Block attention whose queries also see samples of the compressed history."""

    def __init__(self, config: ElasticMemoryConfig, model: ModelConfig, linears: Linears) -> None:
        super().__init__(model, linears, config.state_specs(model), resolve_block(config.block, model))
        self.config = config

    def bank(self, dtype: torch.dtype) -> HippoBank:
        """Return the matrices for every position, which layers of one shape share."""
        c = self.config
        return HippoBank(
            c.order, self.block, c.sample_count, c.sampling, c.sample_offset, c.alpha, c.points, c.discretization,
            c.first_token, dtype,
        )  # fmt: skip

    def recall(self, state: State, block_slice: BlockSlice, like: Tensor) -> list[Past]:
        """See `BlockAttention.recall`: K_mem, V_mem = R C (equation 8), not rotated.

        Rows in the first block of their document see none.
        """
        seen = block_slice.finished_tokens
        if not any(seen):
            return []
        coefficients = state["coefficients"]
        matrix = self.bank(state_dtype(like.dtype)).reconstruction(seen, like.device)
        # [batch, samples, 2, local kv_heads, head_dim]
        sampled = (matrix @ coefficients.flatten(2)).unflatten(2, coefficients.shape[2:])
        keys, values = sampled.to(like.dtype).permute(2, 1, 0, 3, 4)
        visible = None if all(seen) else to_device([t > 0 for t in seen], like.device, torch.bool)
        return [Past(keys, values, visible)]

    def remember(self, state: State, block_slice: BlockSlice, keys: Tensor, values: Tensor) -> State:
        """See `BlockAttention.remember`: C <- P C + K F (equation 6) in rows whose block ends, keys before rotation."""
        closing = block_slice.closing
        starts = tuple(end - self.block if close else 0 for end, close in zip(block_slice.ends, closing, strict=True))
        old = state["coefficients"]
        transition, kernel = self.bank(old.dtype).update_matrices(starts, keys.device)
        block = torch.stack((keys, values), dim=2).to(old.dtype).transpose(0, 1)
        new = transition @ old.flatten(2) + kernel @ block.flatten(2)
        new = new.view_as(old)
        if not all(closing):
            rows = to_device(closing, keys.device, torch.bool).view(-1, 1, 1, 1, 1)
            new = torch.where(rows, new, old)
        return {"coefficients": new}
