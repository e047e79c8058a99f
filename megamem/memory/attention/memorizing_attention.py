"""Memorizing Transformer: the newest keys and values of past blocks in a queue, read by attention.

Wu, Rabe, Hutchins and Szegedy, "Memorizing Transformers", 2022, in the form that the Elastic Memory paper ("Towards
Compressive and Scalable Recurrent Memory") compares: dense attention to the queue in place of the nearest keys, and
gradients through it. The gate is section 3.2 of the original.

    sigmoid  A = g A_mem + (1 - g) A_local,   A_mem = softmax(q K_mem^T / sqrt(d)) V_mem,   g = sigmoid(b), b per head
    none     A = softmax over [K_mem, K_local] at once
    write    [K_mem, V_mem] <- the newest `queue` tokens of [K_mem, V_mem] and the block, keys before rotation

With `window` W the local keys are those of the last W tokens wherever blocks end, as section 3 of the original has them
from a cache like Transformer-XL's. The queue holds these keys too, so that no other state is needed.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import PositiveInt, model_validator
from torch import Tensor

from megamem.config.cost import Flops, attention_flops
from megamem.config.model import MIXERS, MixerConfig, ModelConfig
from megamem.memory.base import Chunk, Losses, State, StateSpec, TensorSpec, detach
from megamem.memory.shared.block_attention import BlockAttention, local_attention_flops, open_specs, resolve_block
from megamem.memory.shared.blocks import BlockSlice
from megamem.memory.shared.cosine import CosineScale, cosine_pair
from megamem.memory.shared.gate import MemoryGate, gated
from megamem.memory.shared.queue import distances, entry_counts, push, queued, readable, seen_where
from megamem.ops.attention.nearest import nearest, nearest_attention
from megamem.ops.attention.softmax import Past, past_attention
from megamem.ops.dropout import Dropout
from megamem.ops.rotary import consecutive_rotary_tables
from megamem.parallel.linears import Linears

INITIAL_SCALE = 20.0
"""What products of normalized queries and keys are multiplied by at the start."""


@MIXERS.register
class MemorizingAttentionConfig(MixerConfig):
    """Memorizing Transformer: a queue of past keys and values beside block-local attention, mixed per head."""

    kind: Literal["memorizing_attention"] = "memorizing_attention"
    """`memorizing_attention`"""
    queue: PositiveInt = 540
    """Tokens of past blocks whose keys and values are kept, the oldest dropped first, token by token."""
    block: PositiveInt | None = None
    """Tokens attended locally and queued at once; the chunk if not given. Divides model.chunk_size."""
    window: PositiveInt | None = None
    """Tokens that local attention sees, the query's own included, also those before its block; the block alone if not
    given. From `block` to `queue` + 1."""
    retrieval: Literal["dense", "topk"] = "dense"
    """What a query sees of the queue: all of it, or the `top_k` keys nearest to it."""
    top_k: PositiveInt | None = None
    """Keys per query and head with retrieval `topk`; the original paper has 32."""
    gate: Literal["sigmoid", "none"] = "sigmoid"
    """`sigmoid`: a softmax over the queue, one over the block, and a learned mixture per head; `none`: one softmax."""
    gate_init: float = 0.0
    """Initial gate of each head before its sigmoid: 0 gives the memory one half of the output."""
    normalize_keys: bool = False
    """Divide queries and keys by their lengths, and scale their products by a learned number per head."""
    stop_gradient: bool = False
    """Treat the queue a call starts from as constant, as the original: nothing is learned through earlier chunks."""

    @model_validator(mode="after")
    def _fits(self) -> MemorizingAttentionConfig:
        if (self.retrieval == "topk") != (self.top_k is not None):
            raise ValueError(
                f"top_k {self.top_k} does not go with retrieval {self.retrieval}; topk needs it, dense sees all"
            )
        if self.top_k is not None and self.top_k > self.queue:
            raise ValueError(f"top_k {self.top_k} is more than the queue of {self.queue} tokens; use retrieval dense")
        return self

    def check(self, model: ModelConfig) -> None:
        """See `MixerConfig.check`."""
        block = resolve_block(self.block, model)
        if self.window is not None and not block <= self.window <= self.queue + 1:
            raise ValueError(
                f"window {self.window} does not fit between the block of {block} tokens, which is seen anyway, and "
                f"{self.queue + 1}, a query's own token and those in the queue"
            )
        if model.qk_norm and self.normalize_keys:
            raise ValueError("qk_norm does not go with normalize_keys, whose queries and keys have length one already")

    def state_specs(self, model: ModelConfig) -> StateSpec:
        """Declare the queue, the newest token last and zeros where nothing has come yet, and the open block."""
        entry = TensorSpec((self.queue, "batch", "kv_heads", model.resolved_head_dim), shard="kv_heads")
        return {"keys": entry, "values": entry, **open_specs(model)}

    def query_key_norms(self) -> int:
        """See `MixerConfig.query_key_norms`."""
        return 1

    def mixing_flops(self, model: ModelConfig, sequence_length: int, causal: bool) -> dict[str, Flops]:
        """Count attention to the tokens in the queue at each block; with `topk` also the search for them.

        The search has no backward pass; with `stop_gradient`, neither have the tokens that a chunk finds in the queue.
        """
        block = resolve_block(self.block, model)
        blocks = -(-sequence_length // block)
        per_key = 2 * model.heads * model.resolved_head_dim / blocks
        reading = searching = Flops(0.0, 0.0)
        before = 0.0
        for begin in range(0, blocks * block, block):
            keys = min(self.queue, begin)
            near = self._near(block, keys)
            seen = keys - near if self.gate == "none" else keys
            chosen = float(np.mean(np.minimum(seen, self.top_k or keys)))
            products = 2 * per_key * (chosen if causal else keys)
            stopped = self.stop_gradient and begin % model.chunk_size == 0
            reading += Flops(products, products * (1 if stopped else 2))
            searching += Flops(per_key * keys * (keys > (self.top_k or keys)), 0.0)
            before += float(near.mean() if causal else near.max()) / blocks
        local = local_attention_flops(block, model, sequence_length, causal)
        local["attention"] += attention_flops(model.heads, model.resolved_head_dim, before)
        parts = {**local, "memory_attention": reading}
        return parts if self.top_k is None else {**parts, "memory_retrieval": searching}

    def _near(self, block: int, entries: int) -> npt.NDArray[np.int64]:
        """Return how many of the queue's entries lie in the window of each query of a block: [block]."""
        return np.clip((self.window or 0) - 1 - np.arange(block), 0, entries)

    def extra_parameters(self, model: ModelConfig) -> int:
        """Count a gate and a scale per head, where there are such."""
        return model.heads * ((self.gate == "sigmoid") + self.normalize_keys)

    def build(self, model: ModelConfig, linears: Linears, layer: int) -> MemorizingAttention:
        """See `MixerConfig.build`."""
        return MemorizingAttention(self, model, linears)


class MemorizingAttention(BlockAttention):
    """Block attention beside attention to a first-in-first-out queue of earlier keys and values."""

    def __init__(self, config: MemorizingAttentionConfig, model: ModelConfig, linears: Linears) -> None:
        super().__init__(model, linears, config.state_specs(model), resolve_block(config.block, model))
        self.config = config
        self.differentiable_state = not config.stop_gradient
        self.gate = MemoryGate(model, linears, config.gate_init) if config.gate == "sigmoid" else None
        self.cosine_scale = (
            CosineScale(model.heads // linears.tp_size, INITIAL_SCALE) if config.normalize_keys else None
        )
        if config.normalize_keys:
            # the learned scale takes the place of the one that depends on the width
            self.score_scale = 1.0

    def forward(self, hidden: Tensor, state: State, chunk: Chunk) -> tuple[Tensor, State, Losses]:
        """See `Mixer.forward`."""
        return super().forward(hidden, state if self.differentiable_state else detach(state), chunk)

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `AttentionProjections.project`; with `normalize_keys`, q k^T / sqrt(d) is the scale times the cosine."""
        query, key, value = super().project(hidden)
        if self.cosine_scale is None:
            return query, key, value
        return *cosine_pair(query, key, self.cosine_scale()), value

    def entries(self, block_slice: BlockSlice) -> list[int]:
        """Return how many tokens of each row's document are in the queue: those of its finished blocks."""
        return entry_counts(block_slice, self.block, self.config.queue)

    def recall(self, state: State, block_slice: BlockSlice, like: Tensor) -> list[Past]:
        """See `BlockAttention.recall`: without a gate the queue stands in front of the block, and of the window.

        Its keys are not rotated, which puts all of them at the block's first position. One softmax counts a token once:
        while it is in a query's window, the query does not see it in the queue.
        """
        entries = self.entries(block_slice)
        if not any(entries):
            return []
        near = self.near(state, block_slice, entries)
        if self.gate is not None:
            return near
        past = queued(state["keys"], state["values"], entries)
        if self.config.window is not None:
            far = distances(block_slice, past.key.shape[0], like.device) >= self.config.window
            past = seen_where(past, far)
        return [past if self.config.top_k is None else nearest(like, past, self.config.top_k), *near]

    def near(self, state: State, block_slice: BlockSlice, entries: list[int]) -> list[Past]:
        """Return the tokens of finished blocks that lie in the windows of a slice's queries, rotated by their places.

        entries: by row, see `entries`; some row has one.
        """
        window = self.config.window or 1
        if window == 1:
            return []
        past = queued(state["keys"], state["values"], [min(count, window - 1) for count in entries])
        columns = past.key.shape[0]
        # the newest entry of each row's queue is the token before its block
        tables = consecutive_rotary_tables(
            -columns, columns, self.width, self.rotation, past.key.dtype, past.key.device
        )
        rotated = Past(self.apply_rotary(past.key, *tables), past.value, past.visible)
        return [seen_where(rotated, distances(block_slice, columns, past.key.device) < window)]

    def mix(self, output: Tensor, query: Tensor, state: State, block_slice: BlockSlice) -> Tensor:
        """Return g A_mem + (1 - g) A_local; A_local alone in rows still in the first block of their document.

        See `BlockAttention.mix`.
        """
        if self.gate is None:
            return output
        entries = self.entries(block_slice)
        # where every queue is empty the gate mixes A_local with itself: ZeRO 3 needs a gradient of every parameter, if
        # of zeros, from each backward pass
        dropout = self.dropout(block_slice.dropout, "memory")
        retrieved = self.retrieve(query, state, entries, dropout) if any(entries) else output
        return gated(retrieved, output, self.gate(), entries)

    def retrieve(self, query: Tensor, state: State, entries: list[int], dropout: Dropout | None) -> Tensor:
        """Return A_mem [tokens, batch, local heads, head_dim]; anything finite in rows with an empty queue.

        query (before rotation): [tokens, batch, local heads, head_dim]; entries: by row, see `entries`; dropout: of the
        queue's shares.
        """
        past = readable(state["keys"], state["values"], entries)
        if self.config.top_k is None:
            return past_attention(self.scaled_query(query), past, self.backend, dropout)
        return nearest_attention(self.scaled_query(query), past, self.config.top_k, self.backend, dropout)

    def remember(self, state: State, block_slice: BlockSlice, keys: Tensor, values: Tensor) -> State:
        """See `BlockAttention.remember`: the block is appended and the oldest tokens are dropped."""
        return {
            "keys": push(state["keys"], keys, block_slice.closing),
            "values": push(state["values"], values, block_slice.closing),
        }
