"""Melodi: what a block leaves behind is summarized into a fixed number of hidden vectors, layer by layer.

Chen et al., "MELODI: Exploring Memory Compression for Long Contexts", 2025, in the form that the Elastic Memory paper
("Towards Compressive and Scalable Recurrent Memory") compares: memory passes from block to block within a layer, not
from layer to layer. The original's long-term memory is an option: a queue to which each block's memory adds a few
entries, read through a gate. The original's summaries, which rise through the layers, are the form `rising`
(`melodi_rising.py`).

    tokens of a block    z = softmax attention of their queries over [keys of the memory m | own keys, causal]
    its summary tokens   u, learned; their queries see [keys of m | keys of the block | their own]: z_u
    new memory           m' = norm(u + W_o (z_u + M^T [z; z_u])), M mixes tokens, channel by channel
    long-term memory     E' = newest entries of [E; K and V of norm(N^T m')], N mixes U vectors into n entries
    read through a gate  z <- g A_E + (1 - g) z, g = sigmoid(b) per channel, A_E = attention to E alone

Letters of shapes: B batch rows, T tokens, L tokens of a block, U summary tokens, H local heads, D head_dim.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import PositiveInt, model_validator
from torch import Tensor, nn

from megamem.config.cost import Flops, attention_flops, product
from megamem.config.model import MIXERS, MixerConfig, ModelConfig
from megamem.config.side_rows import SideRows
from megamem.memory.base import State, StateSpec, TensorSpec, to_device
from megamem.memory.compressive.melodi_rising import RisingMelodi, RisingSizes
from megamem.memory.shared.block_attention import (
    BlockAttention,
    last_columns,
    local_attention_flops,
    open_specs,
    resolve_block,
)
from megamem.memory.shared.blocks import BlockSlice, block_rotary_tables, open_visible
from megamem.memory.shared.gate import MemoryGate
from megamem.memory.shared.queue import entry_counts, gated_reading, push
from megamem.ops.attention.softmax import Past, attention, unmasked_attention
from megamem.ops.dropout import DropoutKeys
from megamem.ops.rotary import consecutive_rotary_tables
from megamem.parallel.linears import Initializer, Linears, declare, normal


@MIXERS.register
class MelodiConfig(MixerConfig):
    """Summary tokens that read each finished block and leave a short memory in front of the next one."""

    kind: Literal["melodi"] = "melodi"
    """`melodi`"""
    form: Literal["layer", "rising"] = "layer"
    """`layer`: each layer has summary tokens of its own, as the Elastic Memory paper compares. `rising`: one set of
    summary rows goes up through all such layers, as in Melodi's own paper."""
    block: PositiveInt | None = None
    """Tokens summarized at once and attended locally; the chunk if not given. Divides model.chunk_size."""
    summaries: PositiveInt = 45
    """Summary tokens U of the layer, and vectors of its memory (45 is the paper's 1x). With `rising` the rows that all
    layers share."""
    memories: PositiveInt | None = None
    """Vectors of the layer's memory with `rising`; as many as `summaries` if not given."""
    long_memory: PositiveInt | None = None
    """Entries of a long-term memory besides, the oldest dropped first; none if not given. The original has 4096."""
    long_increment: PositiveInt = 32
    """Entries that each block adds to the long-term memory."""
    gate_init: float = 0.0
    """Initial gate of each channel before its sigmoid: 0 gives the long-term memory one half of what heads put out."""

    @model_validator(mode="after")
    def _fits(self) -> MelodiConfig:
        if self.long_memory is not None and self.long_increment > self.long_memory:
            raise ValueError(
                f"long_increment {self.long_increment} is more than long_memory {self.long_memory}; at most as many fit"
            )
        return self

    @model_validator(mode="after")
    def _memories_fit(self) -> MelodiConfig:
        if self.form == "layer" and self.memories not in (None, self.summaries):
            raise ValueError(
                f"memories {self.memories} other than summaries {self.summaries} needs form rising; form layer keeps "
                "one vector per summary token"
            )
        return self

    def check(self, model: ModelConfig) -> None:
        """See `MixerConfig.check`."""
        block = resolve_block(self.block, model)
        if self.form == "rising" and model.bias:
            # keys would be the bias alone, which starts at zero: the gradient of its direction would be without bounds
            raise ValueError(
                f"model.bias {str(model.bias).lower()} does not go with form rising: a document's first memory is "
                "zeros, whose keys have no direction; use bias false"
            )
        if self.form == "rising" and model.qk_norm:
            raise ValueError("qk_norm does not go with form rising, whose queries and keys have length one already")
        if self.form == "rising" and block != model.chunk_size:
            raise ValueError(
                f"block {self.block} does not go with form rising: rows rise once per chunk; leave it out or give "
                f"model.chunk_size {model.chunk_size}"
            )

    def rising(self, model: ModelConfig) -> RisingSizes:
        """Return the sizes of the form `rising` in a model."""
        memories = self.memories or self.summaries
        return RisingSizes(model.chunk_size, self.summaries, memories, self.long_memory, self.long_increment)

    def side_rows(self, model: ModelConfig) -> SideRows | None:
        """See `MixerConfig.side_rows`."""
        return SideRows(self.summaries, "end", "learned") if self.form == "rising" else None

    def state_specs(self, model: ModelConfig) -> StateSpec:
        """Declare the memory, and keys, values and attention outputs of the open block.

        The memory holds hidden vectors instead of their keys and values, so that a window that only reads a memory
        still trains the projections it is read by. It has the activations' dtype, as each block makes it anew and
        nothing adds up. The long-term memory holds keys and values: projected again in every block, it would cost more
        than the block.
        """
        if self.form == "rising":
            return self.rising(model).state_specs(model)
        specs = {
            "memory": TensorSpec((self.summaries, "batch", "hidden")),
            **open_specs(model),
            "open_outputs": TensorSpec(("open", "batch", "heads", model.resolved_head_dim), shard="heads", kind="open"),
        }
        if self.long_memory is not None:
            entry = TensorSpec((self.long_memory, "batch", "kv_heads", model.resolved_head_dim), shard="kv_heads")
            specs |= {"long_keys": entry, "long_values": entry}
        return specs

    def training_window(self, model: ModelConfig) -> int:
        """See `MixerConfig.training_window`: what writes a memory learns from the block that reads it."""
        return 2 if resolve_block(self.block, model) == model.chunk_size else 1

    def query_key_norms(self) -> int:
        """See `MixerConfig.query_key_norms`."""
        return 1

    def mixing_flops(self, model: ModelConfig, sequence_length: int, causal: bool) -> dict[str, Flops]:
        """See `MixerConfig.mixing_flops`.

        Counted are attention to the memory, its projection and the summaries in each block, in the first one too, where
        the memory is masked. The last block's memory is read by nobody and has no gradient (for a window that spans the
        sequence); the first block's is a constant, so that its projection has a gradient of the weights only.
        """
        if self.form == "rising":
            return self.rising(model).flops(model, sequence_length, causal)
        block, count = resolve_block(self.block, model), self.summaries
        blocks = -(-sequence_length // block)
        written = (blocks - 1) / blocks
        queries, keys = model.heads * model.resolved_head_dim, model.resolved_kv_heads * model.resolved_head_dim
        projections = 2 * model.hidden_size * (2 * queries + 2 * keys)
        attending, attending_memory = 4 * queries * (block + count), 4 * queries * count
        mixing = 2 * queries * (block + count)
        per_token = count / block
        always = per_token * (projections + attending + mixing)
        recalled = per_token * attending_memory
        retrieval = per_token * 2 * model.hidden_size * 2 * keys
        parts = {
            **local_attention_flops(block, model, sequence_length, causal),
            "memory_attention": attention_flops(model.heads, model.resolved_head_dim, count),
            "memory_retrieval": Flops(retrieval, retrieval * (1 + written)),
            "memory_update": Flops(always + recalled, 2 * (always + recalled) * written),
        }
        return parts if self.long_memory is None else {**parts, **self._long_flops(model, block, blocks)}

    def _long_flops(self, model: ModelConfig, block: int, blocks: int) -> dict[str, Flops]:
        """Count attention of tokens and summaries to the entries at each block, and the making of new ones."""
        entries = [min(i * self.long_increment, self.long_memory or 0) for i in range(blocks)]
        tokens = 4 * model.heads * model.resolved_head_dim * sum(entries) / blocks
        summaries = tokens * self.summaries / block
        learning = summaries * sum(entries[:-1]) / (sum(entries) or 1)
        entry = 2 * model.hidden_size * (self.summaries + 2 * model.resolved_kv_heads * model.resolved_head_dim)
        made = entry * self.long_increment / block
        return {
            "long_memory_attention": Flops(tokens + summaries, 2 * (tokens + learning)),
            "long_memory_update": Flops(made, 2 * made * (blocks - 1) / blocks),
        }

    def extra_parameters(self, model: ModelConfig) -> int:
        """Count summary tokens and mixing weights, the mixing weights of the long-term memory, and its gate."""
        if self.form == "rising":
            return self.rising(model).parameters(model)
        short = self.summaries * (model.hidden_size + resolve_block(self.block, model) + self.summaries)
        long = self.summaries * self.long_increment + model.heads * model.resolved_head_dim
        return short + long * (self.long_memory is not None)

    def rising_parameters(self, model: ModelConfig) -> int:
        """See `MixerConfig.rising_parameters`."""
        return self.rising(model).rising_parameters(model) if self.form == "rising" else 0

    def rising_flops(self, model: ModelConfig) -> Flops:
        """See `MixerConfig.rising_flops`."""
        return product(2.0 * model.hidden_size * self.summaries)

    def build(self, model: ModelConfig, linears: Linears, layer: int) -> Melodi | RisingMelodi:
        """See `MixerConfig.build`."""
        if self.form == "rising":
            return RisingMelodi(self.rising(model), self.gate_init, model.rows_rise_from(layer), model, linears)
        return Melodi(self, model, linears)


class SummaryTokens(nn.Module):
    """The learned tokens u that read a block when it is finished.

    A module of its own, as is `TokenMixing`: ZeRO 3 gathers parameters for the modules that are called.
    """

    def __init__(self, count: int, width: int, init: Initializer) -> None:
        super().__init__()
        self.weight = declare(nn.Parameter(torch.empty(count, width)), init)

    def forward(self) -> Tensor:
        """Return u [U, 1, hidden_size], the same for every row."""
        return self.weight[:, None]


class TokenMixing(nn.Module):
    """The matrix M: linear mixing over the tokens of a block and its summary tokens, in each channel alike."""

    def __init__(self, tokens: int, summaries: int, init: Initializer, linears: Linears) -> None:
        super().__init__()
        self.linears = linears
        self.weight = declare(nn.Parameter(torch.empty(tokens + summaries, summaries)), init, fan_in=0)

    def forward(self, tokens: Tensor, summaries: Tensor) -> Tensor:
        """Return M^T [tokens; summaries] [U, B, H, D], from tokens [L, B, H, D] and summaries [U, B, H, D]."""
        # each tensor-parallel rank mixes its own heads with the whole M
        of_tokens, of_summaries = self.linears.shared(self.weight).split((tokens.shape[0], summaries.shape[0]))
        mixed = of_tokens.T @ tokens.flatten(1) + of_summaries.T @ summaries.flatten(1)
        return mixed.view(summaries.shape)


class LongEntries(nn.Module):
    """The matrix N: linear mixing of a memory's vectors into long-term entries, the same on every rank."""

    def __init__(self, summaries: int, entries: int, init: Initializer) -> None:
        super().__init__()
        self.weight = declare(nn.Parameter(torch.empty(summaries, entries)), init, fan_in=0)

    def forward(self, memory: Tensor) -> Tensor:
        """Return N^T m [entries, B, hidden_size] of a memory [U, B, hidden_size]."""
        return (self.weight.T @ memory.flatten(1)).unflatten(1, memory.shape[1:])


class Melodi(BlockAttention):
    """Block attention whose queries also see the memory that the block before left."""

    def __init__(self, config: MelodiConfig, model: ModelConfig, linears: Linears) -> None:
        block = resolve_block(config.block, model)
        super().__init__(model, linears, config.state_specs(model), block)
        self.config = config
        self.eps = model.norm_eps
        init = normal(model.init_std)
        self.summaries = SummaryTokens(config.summaries, model.hidden_size, init)
        self.mixing = TokenMixing(block, config.summaries, init, linears)
        self.gate: MemoryGate | None = None
        if config.long_memory is not None:
            self.long_entries = LongEntries(config.summaries, config.long_increment, init)
            self.gate = MemoryGate(model, linears, config.gate_init, per_channel=True)

    def recall(self, state: State, block_slice: BlockSlice, like: Tensor) -> list[Past]:
        """See `BlockAttention.recall`: the memory's keys and values, not rotated.

        Rows in the first block of their document see none. Keys and values are made in every block all the same: where
        documents begin differs by rank, and ZeRO 3 gathers the projections from all ranks whenever one uses them.
        """
        written = [tokens > 0 for tokens in block_slice.finished_tokens]
        # one memory on every rank, read by each rank's heads
        memory = self.linears.shared(state["memory"])
        visible = None if all(written) else to_device(written, like.device, torch.bool)
        return [Past(self.keys(memory), self.heads_of(self.value, memory), visible)]

    def join(
        self, output: Tensor, query: Tensor, state: State, block_slice: BlockSlice, keys: DropoutKeys | None
    ) -> Tensor:
        """Return g A_E + (1 - g) output; `output` alone where the long-term memory has no entries yet.

        output, query (before rotation): [T or U, B, H, D]; keys: what dropout draws by. Returns: like `output`.
        """
        if self.gate is None:
            return output
        entries = entry_counts(block_slice, self.config.long_increment, state["long_keys"].shape[0])
        queue = state["long_keys"], state["long_values"]
        dropout = self.dropout(keys, "memory")
        return gated_reading(output, self.scaled_query(query), *queue, entries, self.gate(), self.backend, dropout)

    def summarize(self, seen: list[Past], outputs: Tensor, state: State, block_slice: BlockSlice) -> Tensor:
        """Return the memory that a finished block leaves, m' = norm(u + W_o (z_u + M^T [z; z_u])), [U, B, hidden_size].

        Args:
            seen: the memory before, and the block's rotated keys and values.
            outputs: z, what the heads of its tokens put out, [L, B, H, D].
            state, block_slice: for the long-term memory, which the summary tokens read too.
        """
        u = self.summaries()
        x = self.linears.shared(self._normed(u)).expand(-1, outputs.shape[1], -1)
        query, key, value = self.queries(x), self.keys(x), self.heads_of(self.value, x)
        # summary tokens have no order: all of them stand at the position after the block's last token
        after = consecutive_rotary_tables(self.block, 1, self.width, self.rotation, query.dtype, query.device)
        rotated_query, key = (self.apply_rotary(part, *after) for part in (query, key))
        keys = block_slice.dropout
        if keys is not None:
            # numbered by the end of the block, however many calls have read it
            keys = keys.inside("summaries").at((keys.offset + block_slice.tokens) * self.config.summaries)
        parts = [*seen, Past(key, value)]
        own = unmasked_attention(self.scaled_query(rotated_query), parts, self.backend, self.dropout(keys))
        own = self.join(own, query, state, block_slice, keys)
        # M acts on tokens and W_o on channels, so that they commute: mixed first, few rows are projected, and no rank
        # needs the others' heads
        mixed = own + self.mixing(outputs, own)
        return self._normed(u + self.linears.whole(self.output, mixed.flatten(2)))

    def remember_long(self, state: State, memory: Tensor, block_slice: BlockSlice) -> State:
        """Return the queue with the keys and values of a few mixtures of the new memory, in rows whose block ends.

        memory: m' [U, B, hidden_size].
        """
        if self.gate is None:
            return {}
        entries = self.linears.shared(self._normed(self.long_entries(memory)))
        return {
            "long_keys": push(state["long_keys"], self.keys(entries), block_slice.closing),
            "long_values": push(state["long_values"], self.heads_of(self.value, entries), block_slice.closing),
        }

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, state: State, block_slice: BlockSlice
    ) -> tuple[Tensor, State]:
        """See `BlockAttention._attend` ([T, B, H, D]); a block that ends is summarized."""
        # the open tokens of the block stand in front of the new ones
        open_tokens = state["open_keys"].shape[0]
        keys = torch.cat((state["open_keys"], key)) if open_tokens else key
        values = torch.cat((state["open_values"], value)) if open_tokens else value
        cos, sin = block_rotary_tables(block_slice, open_tokens, self.width, self.rotation, keys)
        seen_keys, seen_values = self.local(keys, values)
        rotated_keys = self.apply_rotary(seen_keys, cos, sin)
        # z: attention to the memory and, causally, within the block
        memory = self.recall(state, block_slice, query)
        past = memory
        if open_tokens:
            visible = open_visible(block_slice, open_tokens, key.device)
            past = [*memory, Past(rotated_keys[:open_tokens], seen_values[:open_tokens], visible)]
        rotated_query = self.apply_rotary(query, cos[open_tokens:], sin[open_tokens:])
        output = attention(
            self.scaled_query(rotated_query), rotated_keys[open_tokens:], seen_values[open_tokens:], past, self.backend,
            self.dropout(block_slice.dropout),
        )  # fmt: skip
        output = self.join(output, query, state, block_slice, block_slice.dropout)
        outputs = torch.cat((state["open_outputs"], output)) if open_tokens else output
        new = dict(state)
        if any(block_slice.closing):
            # the new memory; only rows whose block closes hold a whole block, the others keep theirs
            block = slice(-self.block, None)
            seen = [*memory, Past(rotated_keys[block], seen_values[block])]
            new["memory"] = self.summarize(seen, outputs[block], state, block_slice)
            new |= self.remember_long(state, new["memory"], block_slice)
            if not all(block_slice.closing):
                rows = to_device(block_slice.closing, key.device, torch.bool).view(-1, 1)
                new["memory"] = torch.where(rows, new["memory"], state["memory"])
        kept = {"open_keys": keys, "open_values": values, "open_outputs": outputs}
        return output, new | {
            name: last_columns(tensor, block_slice.open_tokens_after) for name, tensor in kept.items()
        }

    def _normed(self, x: Tensor) -> Tensor:
        """Return x [U, B, hidden_size] at the scale of normalized tokens; this norm has no weights."""
        return F.rms_norm(x, x.shape[-1:], eps=self.eps)
