"""Melodi as its paper has it: one set of summary rows rises through the layers, mixed anew behind each layer's MLP.

Chen et al., "MELODI: Exploring Memory Compression for Long Contexts", 2025. The tokens of a chunk x_0 .. x_{L-1} and,
behind them, U summary rows u go through the layer together (`ModelConfig.side_rows`); m are the S vectors that the
layer's memory holds from the chunk before, zeros at the start of a document:

    attention    row i of [x; u] over [norm_m(m) | rows before i], strictly: no row sees itself. Queries and keys have
                 length one; their products are multiplied by a learned number per head
    then         the residual, the MLP and its residual, which give x' and u'
    rise         u+ = u' + M_u^T [norm_x(x'); norm_u(u')] + b_u        goes to the layer above
    write        m+ = u' + M_m^T [norm_x(x'); norm_u(u')] + b_m        waits for the next chunk, where S = U
                 m+ =      M_m^T [x'; u'] + b_m                        where S differs from U
    long-term    E+ = newest entries of [E; K and V of norm_m(M_e^T [x'; u'] + b_e)], read through a gate as in
                 `melodi.py`

    layer l + 1   x x x x | u+            M act on places, each channel alike; all are this layer's own.
                  ▲       ╲▲   ╲          The topmost layer has nothing to hand up and no M_u
    layer l       x x x x | u   m+ ─► m of the next chunk

Letters of shapes: B batch rows, L tokens of a chunk, U side rows, R = L + U, S memory vectors, H heads, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megamem.config.cost import Flops, attention_flops, product
from megamem.config.model import ModelConfig
from megamem.memory.base import Chunk, Losses, State, StateSpec, TensorSpec
from megamem.memory.shared.block_attention import AttentionProjections, last_columns, open_specs
from megamem.memory.shared.cosine import CosineScale, cosine_pair
from megamem.memory.shared.gate import MemoryGate
from megamem.memory.shared.queue import gated_reading, push
from megamem.ops.attention.softmax import Past, attention
from megamem.ops.rotary import consecutive_rotary_tables
from megamem.ops.unit import unit
from megamem.parallel.linears import Initializer, Linears, constant, declare, normal


@dataclass(frozen=True)
class RisingSizes:
    """Sizes of the rising form."""

    tokens: int
    """L, tokens of a chunk."""
    summaries: int
    """U, side rows."""
    memories: int
    """S, vectors of a layer's memory."""
    long_memory: int | None
    """Entries of the layer's long-term memory; None: it has none."""
    long_increment: int
    """Entries that each chunk adds to it."""

    @property
    def rows(self) -> int:
        """R, what goes through the layer with each chunk."""
        return self.tokens + self.summaries

    def state_specs(self, model: ModelConfig) -> StateSpec:
        """Declare the memory, and of the open chunk keys, values and what the layer made of its tokens."""
        specs = {
            "memory": TensorSpec((self.memories, "batch", "hidden")),
            **open_specs(model),
            "open_outputs": TensorSpec(("open", "batch", "hidden"), kind="open"),
        }
        if self.long_memory is not None:
            entry = TensorSpec((self.long_memory, "batch", "kv_heads", model.resolved_head_dim), shard="kv_heads")
            specs |= {"long_keys": entry, "long_values": entry}
        return specs

    def parameters(self, model: ModelConfig) -> int:
        """Count what a layer has besides its projections, `rising_parameters` included."""
        # scales of three norms, and of the heads' cosines
        vectors = 3 * model.hidden_size + model.heads
        short = vectors + self._mixing(self.memories) + self._mixing(self.summaries)
        if self.long_memory is None:
            return short
        return short + self._mixing(self.long_increment) + model.heads * model.resolved_head_dim

    def rising_parameters(self, model: ModelConfig) -> int:
        """Count M_u and b_u, and the norms where nothing else uses them."""
        return self._mixing(self.summaries) + (0 if self.memories == self.summaries else 2 * model.hidden_size)

    def _mixing(self, outputs: int) -> int:
        """Count a mixing matrix and its bias."""
        return (self.rows + 1) * outputs

    def flops(self, model: ModelConfig, sequence_rows: int, causal: bool) -> dict[str, Flops]:
        """Count FLOPs per row besides the projections and M_u, averaged over the chunks of a sequence.

        The memory after the last chunk is read by nobody and has no gradient (for a window that spans the sequence).
        """
        chunks = -(-sequence_rows // self.rows)
        written = (chunks - 1) / chunks
        width, keys = model.resolved_head_dim, 2 * model.resolved_kv_heads * model.resolved_head_dim
        seen = (self.rows - 1) / 2 + self.memories if causal else self.rows + self.memories - 1
        recalled = 2 * model.hidden_size * keys * self.memories / self.rows
        # every row of a chunk is multiplied with every output
        mixing = 2 * model.hidden_size
        parts = {
            "attention": attention_flops(model.heads, width, seen),
            "memory_retrieval": product(recalled),
            "memory_update": Flops(mixing * self.memories, 2 * mixing * self.memories * written),
        }
        if self.long_memory is None:
            return parts
        entries = [min(chunk * self.long_increment, self.long_memory) for chunk in range(chunks)]
        made = (mixing + 2 * model.hidden_size * keys / self.rows) * self.long_increment
        return {
            **parts,
            "long_memory_attention": attention_flops(model.heads, width, sum(entries) / chunks),
            "long_memory_update": Flops(made, 2 * made * written),
        }


class RowNorm(nn.Module):
    """RMSNorm of rows that every rank holds whole: x / rms(x) * weight (Zhang & Sennrich, 2019)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = declare(nn.Parameter(torch.empty(width)), constant(1.0))

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class RowMixing(nn.Module):
    """A matrix M and a bias b over the places of a chunk: each output is a sum of its rows, channel by channel."""

    def __init__(self, rows: int, outputs: int, init: Initializer) -> None:
        super().__init__()
        self.weight = declare(nn.Parameter(torch.empty(rows, outputs)), init, fan_in=0)
        self.bias = declare(nn.Parameter(torch.empty(outputs)), constant(0.0))

    def forward(self, rows: Tensor) -> Tensor:
        """Return M^T rows + b [outputs, B, hidden_size] of rows [R, B, hidden_size]."""
        return torch.addmm(self.bias[:, None], self.weight.T, rows.flatten(1)).unflatten(1, rows.shape[1:])


class RisingMelodi(AttentionProjections):
    """Strictly causal attention over a memory, a chunk and its summary rows, all of which change behind the MLP."""

    remembers_keys = False

    def __init__(self, sizes: RisingSizes, gate_init: float, rises: bool, model: ModelConfig, linears: Linears) -> None:
        """Build the mixer of a layer; rises: whether a layer above reads the summary rows that leave it."""
        super().__init__(model, linears, sizes.state_specs(model))
        self.rising = sizes
        # the learned scale takes the place of the one that depends on the width
        self.score_scale = 1.0
        init = normal(model.init_std)
        # as far as scores reach whose queries and keys have unit variance and are divided by sqrt(head_dim)
        self.cosine_scale = CosineScale(model.heads // linears.tp_size, self.width**0.5)
        self.memory_norm = RowNorm(model.hidden_size, model.norm_eps)
        self.memory_mixing = RowMixing(sizes.rows, sizes.memories, init)
        self.summary_mixing = RowMixing(sizes.rows, sizes.summaries, init) if rises else None
        self.same = sizes.memories == sizes.summaries
        if self.same or rises:
            self.token_norm, self.summary_norm = (RowNorm(model.hidden_size, model.norm_eps) for _ in range(2))
        self.gate: MemoryGate | None = None
        if sizes.long_memory is not None:
            self.entry_mixing = RowMixing(sizes.rows, sizes.long_increment, init)
            self.gate = MemoryGate(model, linears, gate_init, per_channel=True)

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `AttentionProjections.project`: queries and keys of cosines; hidden [rows, B, hidden_size]."""
        query, key, value = super().project(hidden)
        return *cosine_pair(query, key, self.cosine_scale()), value

    def remembered_pair(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Project vectors that are no rows of the call [rows, B, hidden_size] to key and value [rows, B, kv heads, D].

        They are the same on every rank, and are read by each rank's heads.
        """
        shared = self.linears.shared(self.memory_norm(vectors))
        key, value = (layer(shared).unflatten(-1, (-1, self.width)) for layer in (self.key, self.value))
        return unit(key), value

    def forward(self, hidden: Tensor, state: State, chunk: Chunk) -> tuple[Tensor, State, Losses]:
        """See `Mixer.forward`; a call ends at a chunk's border at the latest, and then has the side rows behind it."""
        query, key, value = self.project(hidden)
        memory_key, memory_value = self.remembered_pair(state["memory"])
        # the open tokens of the chunk stand in front of the new ones
        keys, values = torch.cat((state["open_keys"], key)), torch.cat((state["open_values"], value))
        opened, tokens = state["open_keys"].shape[0], keys.shape[0] - chunk.rows_behind
        # in a call of left padding the chunk's first places may never have been read
        begin = (chunk.starts[0] - opened) % self.rising.tokens
        cos, sin = consecutive_rotary_tables(begin, keys.shape[0], self.width, self.rotation, keys.dtype, keys.device)
        seen_keys, seen_values = self.local(keys[:tokens], values[:tokens])
        rotated_keys = self.apply_rotary(torch.cat((seen_keys, keys[tokens:])), cos, sin)
        rotated_query = self.apply_rotary(query, cos[opened:], sin[opened:])
        # strictly causal: the row before each query is the last that it sees, so the own keys are those one place ahead
        all_keys = torch.cat((memory_key, rotated_keys))
        all_values = torch.cat((memory_value, seen_values, values[tokens:]))
        own = all_keys.shape[0] - query.shape[0] - 1
        past = Past(all_keys[:own], all_values[:own])
        dropout = self.dropout(chunk.dropout, rows_behind=chunk.rows_behind)
        output = attention(rotated_query, all_keys[own:-1], all_values[own:-1], [past], self.backend, dropout)
        output = self.join_long(output, query, state, chunk)
        kept = 0 if chunk.rows_behind else tokens
        new = {**state, "open_keys": last_columns(keys, kept), "open_values": last_columns(values, kept)}
        return self.output(output.flatten(2)), new, {}

    def join_long(self, output: Tensor, query: Tensor, state: State, chunk: Chunk) -> Tensor:
        """Return g A_E + (1 - g) output; `output` alone where the long-term memory has no entries yet.

        output, query (before rotation): [rows, B, H, D]. Returns: like `output`.
        """
        if self.gate is None:
            return output
        capacity, sizes = state["long_keys"].shape[0], self.rising
        entries = [min(max(start, 0) // sizes.tokens * sizes.long_increment, capacity) for start in chunk.starts]
        queue = state["long_keys"], state["long_values"]
        dropout = self.dropout(chunk.dropout, "memory", rows_behind=chunk.rows_behind)
        return gated_reading(output, query, *queue, entries, self.gate(), self.backend, dropout)

    def after_layer(self, hidden: Tensor, state: State, chunk: Chunk) -> tuple[Tensor, State]:
        """See `Mixer.after_layer`: where a chunk ends, its memory is written and the summary rows are mixed."""
        # with tokens split over ranks, every rank mixes whole columns alike
        whole = self.linears.join_tokens(hidden)
        tokens, summaries = whole.split((whole.shape[0] - chunk.rows_behind, chunk.rows_behind))
        outputs = torch.cat((state["open_outputs"], tokens))
        if not chunk.rows_behind:
            return hidden, {**state, "open_outputs": outputs}
        # places in front of left padding were never read; what is written of them is forgotten
        outputs = F.pad(outputs, (0, 0, 0, 0, self.rising.tokens - outputs.shape[0], 0))
        plain = torch.cat((outputs, summaries))
        normed = torch.cat((self.token_norm(outputs), self.summary_norm(summaries))) if self._norms else plain
        memory = self.memory_mixing(normed) + summaries if self.same else self.memory_mixing(plain)
        new = {**state, "memory": memory, "open_outputs": last_columns(outputs, 0)}
        if self.gate is not None:
            pair = self.remembered_pair(self.entry_mixing(plain))
            closing = (True,) * chunk.rows
            for name, entries in zip(("long_keys", "long_values"), pair, strict=True):
                new[name] = push(state[name], entries, closing)
        if self.summary_mixing is None:
            return hidden, new
        risen = summaries + self.summary_mixing(normed)
        return self.linears.split_tokens(torch.cat((tokens, risen))), new

    @property
    def _norms(self) -> bool:
        """Whether anything of this layer is mixed from normalized rows."""
        return self.same or self.summary_mixing is not None
