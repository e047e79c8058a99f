"""Causal attention within blocks, with whatever a mechanism puts in front of each block or beside it.

The base of local attention and of the memories beside it. A memory overrides `recall` (keys and values that the
queries of a block see besides the block), or `mix` (what joins the output of local attention), and `remember` (what a
finished block leaves behind).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megamem.config.cost import Flops, attention_flops
from megamem.config.model import ModelConfig
from megamem.memory.base import Chunk, Losses, Mixer, State, StateSpec, TensorSpec, state_dtype
from megamem.memory.shared.blocks import (
    BlockSlice,
    block_rotary_tables,
    block_slices,
    open_visible,
    rotation_of,
    split_tokens,
)
from megamem.memory.shared.row_by_row import read_rows
from megamem.ops.attention.softmax import Past, attention
from megamem.ops.dropout import Dropout, DropoutKeys
from megamem.ops.rotary import apply_rotary
from megamem.parallel.linears import Linears, constant, declare, normal


def open_specs(model: ModelConfig) -> dict[str, TensorSpec]:
    """Declare the keys (before rotation) and values of the unfinished block."""
    spec = TensorSpec(("open", "batch", "kv_heads", model.resolved_head_dim), shard="kv_heads", kind="open")
    return {"open_keys": spec, "open_values": spec}


def resolve_block(block: int | None, model: ModelConfig) -> int:
    """Return the tokens of a block: the mixer's `block` field, or the chunk if it is not given.

    Raises: ValueError unless it divides the chunk.
    """
    size = block or model.chunk_size
    if model.chunk_size % size:
        raise ValueError(f"block {size} does not divide model.chunk_size {model.chunk_size}")
    return size


def local_attention_flops(block: int, model: ModelConfig, sequence_length: int, causal: bool) -> dict[str, Flops]:
    """Return the FLOPs per token of attention within blocks.

    causal: a query counts the keys it sees, on average (block + 1) / 2; False: all keys of the block.
    """
    block = min(block, sequence_length)
    return {"attention": attention_flops(model.heads, model.resolved_head_dim, (block + 1) / 2 if causal else block)}


def last_columns(x: Tensor, count: int) -> Tensor:
    """Return the last `count` tokens of x [tokens, ...].

    An empty result is a new tensor: an empty view would keep all of x's memory alive.
    """
    return x[x.shape[0] - count :] if count else x.new_zeros((0, *x.shape[1:]))


def unrotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [tokens, batch, heads, head_dim] as it is.

    It replaces `apply_rotary` where positions are learned: the embedding has added them already.
    """
    return x


class QueryKeyNorm(nn.Module):
    """RMSNorm of each head of queries, or of keys, with one weight for each channel that all heads share."""

    def __init__(self, width: int, eps: float, linears: Linears) -> None:
        super().__init__()
        self.eps = eps
        self.linears = linears
        self.weight = declare(nn.Parameter(torch.empty(width)), constant(1.0))

    def forward(self, x: Tensor, fixed: bool = False) -> Tensor:
        """[tokens, batch, local heads, head_dim] -> the same; with `fixed` the weight gets no gradient."""
        # each tensor-parallel rank normalizes its own heads with the whole weight
        weight = self.weight.detach() if fixed else self.linears.shared(self.weight)
        return F.rms_norm(x, x.shape[-1:], weight, self.eps)


class ProjectionNorm(nn.Module):
    """RMSNorm of all heads' queries, or keys, of a token together, with a weight for each of their numbers."""

    def __init__(self, heads: int, width: int, eps: float, linears: Linears) -> None:
        super().__init__()
        self.eps, self.count, self.linears = eps, heads * width, linears
        self.weight = declare(nn.Parameter(torch.empty(self.count // linears.tp_size)), constant(1.0), shard_axis=0)

    def forward(self, x: Tensor, fixed: bool = False) -> Tensor:
        """[tokens, batch, local heads, head_dim] -> the same; with `fixed` the weight gets no gradient."""
        exact = x.to(state_dtype(x.dtype))
        # each tensor-parallel rank has some of the heads: their squares are summed over ranks, gradients of the sum too
        squares = self.linears.shared(self.linears.sum_over_ranks(exact.square().sum((-2, -1))[..., None]))
        weight = self.weight.detach() if fixed else self.weight
        scaled = exact * torch.rsqrt(squares / self.count + self.eps)[..., None]
        return scaled.to(x.dtype) * weight.unflatten(0, x.shape[-2:])


def make_query_key_norm(model: ModelConfig, heads: int, linears: Linears) -> nn.Module | None:
    """Make the norm of the queries or keys of so many heads, as `model.qk_norm` says; None: there is none."""
    if model.qk_norm == "projection":
        return ProjectionNorm(heads, model.resolved_head_dim, model.norm_eps, linears)
    return QueryKeyNorm(model.resolved_head_dim, model.norm_eps, linears) if model.qk_norm else None


class AttentionProjections(Mixer):
    """Query, key, value and output projections of attention mixers; heads are split over tensor-parallel ranks."""

    remembers_keys = True
    """Whether what it remembers is made of `project`'s keys and values."""

    def __init__(self, model: ModelConfig, linears: Linears, specs: StateSpec) -> None:
        super().__init__(specs, model.state_sizes, linears.tp_size)
        self.linears = linears
        self.width = model.resolved_head_dim
        self.rotation = rotation_of(model)
        self.backend = model.attention_kernel
        self.score_scale = model.score_scale
        self.attention_dropout = model.attention_dropout
        self.rotates = model.positions == "rotary"
        self.apply_rotary = apply_rotary if self.rotates else unrotated
        init, biased = normal(model.init_std), bool(model.bias)
        self.query = linears.column(model.hidden_size, model.heads * model.resolved_head_dim, init, biased)
        self.key = linears.column(model.hidden_size, model.resolved_kv_heads * model.resolved_head_dim, init, biased)
        self.value = linears.column(model.hidden_size, model.resolved_kv_heads * model.resolved_head_dim, init, biased)
        self.query_norm, self.key_norm = (
            make_query_key_norm(model, heads, linears) for heads in (model.heads, model.resolved_kv_heads)
        )
        back = normal(model.init_std / (2 * model.layers) ** 0.5)
        self.output = linears.row(model.heads * model.resolved_head_dim, model.hidden_size, back, model.all_biases)

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project hidden [tokens, batch, hidden_size] to query, key and value before rotation.

        Returns: query [tokens, batch, local heads, head_dim]; key, value [tokens, batch, local kv_heads, head_dim].
        """
        x = self.linears.enter(hidden)
        return self.queries(x), self.keys(x), self.heads_of(self.value, x)

    def queries(self, x: Tensor) -> Tensor:
        """Project x [tokens, batch, hidden_size] to query [tokens, batch, local heads, head_dim], normalized or not."""
        query = self.heads_of(self.query, x)
        normalized: Tensor = query if self.query_norm is None else self.query_norm(query)
        return normalized

    def keys(self, x: Tensor) -> Tensor:
        """Project x [tokens, batch, hidden_size] to key [tokens, batch, local kv_heads, head_dim], see `queries`."""
        key = self.heads_of(self.key, x)
        normalized: Tensor = key if self.key_norm is None else self.key_norm(key)
        return normalized

    def heads_of(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Project x [tokens, batch, hidden_size] by `layer` to [tokens, batch, local heads or kv_heads, head_dim]."""
        out: Tensor = layer(x)
        return out.unflatten(-1, (-1, self.width))

    def scaled_query(self, query: Tensor) -> Tensor:
        """Return query [tokens, batch, local heads, head_dim] times `model.score_scale`.

        The attention kernels divide scores by sqrt(head_dim) themselves; any other scale enters here.
        """
        return query if self.score_scale == 1.0 else query * self.score_scale

    def dropout(
        self, keys: DropoutKeys | None, place: str = "attention", rows_before: int = 0, rows_behind: int = 0
    ) -> Dropout | None:
        """Return which shares of attention are dropped; None if none are.

        Args:
            keys: at the first query (`Chunk.dropout`).
            place: name of one softmax among those of the mixer.
            rows_before, rows_behind: how many of the first and of the last queries are side rows.
        """
        if keys is None or not self.attention_dropout:
            return None
        first = self.linears.tp_rank * (self.sizes["heads"] // self.tp_size)
        return Dropout(self.attention_dropout, keys.inside(place), rows_before, rows_behind, first)

    def local(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [tokens, batch, local kv_heads, head_dim] of a block as its own queries see them.

        Here they come back as they are; `megamem.evaluation.corruption` replaces this method to measure what a model
        knows without its local context.
        """
        return keys, values


class BlockAttention(AttentionProjections):
    """Softmax attention, causal inside each block of `block` tokens; rotary positions restart with the block."""

    reads_borders = True

    def __init__(self, model: ModelConfig, linears: Linears, specs: StateSpec, block: int) -> None:
        super().__init__(model, linears, specs)
        self.block = block

    def recall(self, state: State, block_slice: BlockSlice, like: Tensor) -> list[Past]:
        """Return the keys and values of the past that the queries of a block slice may see.

        like: the rotated queries [tokens, batch, local heads, head_dim].
        """
        return []

    def mix(self, output: Tensor, query: Tensor, state: State, block_slice: BlockSlice) -> Tensor:
        """Join the output of local attention with what a memory answers to the same queries.

        output, query (before rotation): [tokens, batch, local heads, head_dim].
        """
        return output

    def remember(self, state: State, block_slice: BlockSlice, keys: Tensor, values: Tensor) -> State:
        """Return the new memory tensors after a slice that closes the block of some rows (`block_slice.closing`).

        keys (before rotation), values: [block, batch, local kv_heads, head_dim]; only closing rows hold a whole block.
        """
        return {}

    def forward(self, hidden: Tensor, state: State, chunk: Chunk) -> tuple[Tensor, State, Losses]:
        """See `Mixer.forward`."""
        projections = self.project(hidden)
        mixed, state = read_rows(
            self.specs, state, chunk, self.block,
            lambda rows, own, here: self._read(tuple(x[:, rows] for x in projections), own, here),
        )  # fmt: skip
        return self.output(mixed.flatten(2)), state, {}

    def _read(self, projections: tuple[Tensor, ...], state: State, chunk: Chunk) -> tuple[Tensor, State]:
        """Read a call block by block: [tokens, batch, local heads, head_dim], the new state.

        projections: query, key and value of its tokens, see `project`.
        """
        outputs = []
        parts = block_slices(chunk, projections[0].shape[0], self.block)
        for block_slice, (query, key, value) in zip(parts, split_tokens(parts, *projections), strict=True):
            state = self.reset_inside(state, block_slice.begin, block_slice.starts, projections[0])
            output, state = self._attend(query, key, value, state, block_slice)
            outputs.append(output)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs), state

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, state: State, block_slice: BlockSlice
    ) -> tuple[Tensor, State]:
        """Attend from the tokens of one block slice, and write the state.

        query, key, value: `project` of these tokens. Returns: [tokens, batch, local heads, head_dim], the new state.
        """
        # the open tokens of the block stand in front of the new ones
        open_tokens = state["open_keys"].shape[0]
        keys = torch.cat((state["open_keys"], key)) if open_tokens else key
        values = torch.cat((state["open_values"], value)) if open_tokens else value
        cos, sin = block_rotary_tables(block_slice, open_tokens, self.width, self.rotation, keys)
        seen_keys, seen_values = self.local(keys, values)
        rotated_keys = self.apply_rotary(seen_keys, cos, sin)
        rotated_query = self.apply_rotary(query, cos[open_tokens:], sin[open_tokens:])
        past = self.recall(state, block_slice, rotated_query)
        if open_tokens:
            visible = open_visible(block_slice, open_tokens, key.device)
            past = [*past, Past(rotated_keys[:open_tokens], seen_values[:open_tokens], visible)]
        output = attention(
            self.scaled_query(rotated_query), rotated_keys[open_tokens:], seen_values[open_tokens:], past, self.backend,
            self.dropout(block_slice.dropout),
        )  # fmt: skip
        output = self.mix(output, query, state, block_slice)
        new = dict(state)
        if any(block_slice.closing):
            new |= self.remember(state, block_slice, keys[-self.block :], values[-self.block :])
        new["open_keys"] = last_columns(keys, block_slice.open_tokens_after)
        new["open_values"] = last_columns(values, block_slice.open_tokens_after)
        return output, new
