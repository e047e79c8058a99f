"""Sliding-window attention: each token attends to itself and the `window` - 1 tokens before it.

It is the attention of Samba (Ren et al., "Samba: Simple Hybrid State Space Models", 2024):

    y_t = softmax(q_t . k_i / sqrt(d) over t - window < i <= t) v

The state is the window: keys, rotated by their position in the document, and values of the last `window` - 1 tokens.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import PositiveInt
from torch import Tensor

from megamem.config.cost import Flops, attention_flops
from megamem.config.model import MIXERS, MixerConfig, ModelConfig
from megamem.memory.base import Chunk, Losses, State, StateSpec, TensorSpec, to_device
from megamem.memory.shared.block_attention import AttentionProjections, last_columns
from megamem.memory.shared.blocks import row_rotary_tables
from megamem.memory.shared.row_by_row import apart, row_chunk
from megamem.ops.attention.softmax import Past, attention
from megamem.ops.slices import slices
from megamem.parallel.linears import Linears


@MIXERS.register
class SlidingAttentionConfig(MixerConfig):
    """Causal attention to the last `window` tokens of the document, wherever chunks end."""

    kind: Literal["sliding_attention"] = "sliding_attention"
    """`sliding_attention`"""
    window: PositiveInt | None = None
    """Tokens a query sees, its own included; the chunk's number if not given."""

    def resolved(self, model: ModelConfig) -> int:
        """Return the number of tokens of the window."""
        return self.window or model.chunk_size

    def state_specs(self, model: ModelConfig) -> StateSpec:
        """Declare the window's keys and values, the newest last; zeros where the document is shorter."""
        spec = TensorSpec((self.resolved(model) - 1, "batch", "kv_heads", model.resolved_head_dim), shard="kv_heads")
        return {"keys": spec, "values": spec}

    def query_key_norms(self) -> int:
        """See `MixerConfig.query_key_norms`."""
        return 1

    def mixing_flops(self, model: ModelConfig, sequence_length: int, causal: bool) -> dict[str, Flops]:
        """See `MixerConfig.mixing_flops`: attention to what the window holds.

        As computed (causal False), to all of a part's keys and the window before them.
        """
        window = min(self.resolved(model), sequence_length)
        if causal:
            keys = window - window * (window - 1) / (2 * sequence_length)
        else:
            keys = _computed_keys(self.resolved(model), model.chunk_size, sequence_length)
        return {"attention": attention_flops(model.heads, model.resolved_head_dim, keys)}

    def build(self, model: ModelConfig, linears: Linears, layer: int) -> SlidingAttention:
        """See `MixerConfig.build`."""
        return SlidingAttention(model, linears, self.state_specs(model), self.resolved(model))


def part_tokens(window: int) -> int:
    """Return how many queries share one rectangle of keys: few enough that most of it is within their windows."""
    return min(window, max(window // 4, 64))


def _computed_keys(window: int, chunk: int, sequence_length: int) -> float:
    """Return the keys per query, averaged over a sequence, counting whole rectangles."""
    step, computed = part_tokens(window), 0
    for first in range(0, sequence_length, chunk):
        last = min(first + chunk, sequence_length)
        for begin in range(first, last, step):
            tokens = min(step, last - begin)
            computed += tokens * (min(begin, window - 1) + tokens)
    return computed / sequence_length


class SlidingAttention(AttentionProjections):
    """Attention over a window that moves with every token."""

    reads_borders = True

    def __init__(self, model: ModelConfig, linears: Linears, specs: StateSpec, window: int) -> None:
        super().__init__(model, linears, specs)
        self.window = window

    def forward(self, hidden: Tensor, state: State, chunk: Chunk) -> tuple[Tensor, State, Losses]:
        """See `Mixer.forward`."""
        query, key, value = self.project(hidden)
        tokens, before = query.shape[0], self.window - 1
        tables = row_rotary_tables(chunk, tokens, self.width, self.rotation, query)
        query, key = self.scaled_query(self.apply_rotary(query, *tables)), self.apply_rotary(key, *tables)
        keys, values = torch.cat((state["keys"], key)), torch.cat((state["values"], value))
        seen, local = (keys, values), self.local(key, value)
        if local[0] is not key:  # the call's own as an experiment changes them; what is kept stays as it is
            seen = torch.cat((state["keys"], local[0])), torch.cat((state["values"], local[1]))
        if apart(chunk):
            rows = [slice(row, row + 1) for row in range(chunk.rows)]
            of_rows = (self._attend(query[:, r], seen[0][:, r], seen[1][:, r], row_chunk(chunk, r.start)) for r in rows)
            mixed = torch.cat(list(of_rows), dim=1)
        else:
            mixed = self._attend(query, *seen, chunk)
        # copies: views would keep the call's own keys and values alive
        window = {"keys": last_columns(keys, before).clone(), "values": last_columns(values, before).clone()}
        ends = chunk.after(tokens).starts
        if chunk.begins_inside and min(ends) < before:  # documents before the last one are forgotten
            ages = torch.arange(before, 0, -1, device=keys.device)[:, None]
            kept = (ages <= to_device(ends, keys.device))[..., None, None]
            window = {name: columns.where(kept, 0.0) for name, columns in window.items()}
        return self.output(mixed.flatten(2)), window, {}

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor, chunk: Chunk) -> Tensor:
        """Attend from a call's queries [tokens, batch, local heads, head_dim] to their windows; returns the like.

        keys, values: those before the call and its own, [window - 1 + tokens, batch, local kv_heads, head_dim].
        """
        before, outputs = self.window - 1, []
        parts = self._parts(chunk, query.shape[0])
        # the columns that each part sees: as far back as a row's document reaches, and its own
        reaches = [self._reach(chunk.after(part.start)) for part in parts]
        columns = [
            slice(before + part.start - max(reach), before + part.stop)
            for part, reach in zip(parts, reaches, strict=True)
        ]
        seen = zip(slices(query, parts), slices(keys, columns), slices(values, columns), strict=True)
        for part, reach, (own_query, key, value) in zip(parts, reaches, seen, strict=True):
            border, dropout = max(reach), self.dropout(chunk.after(part.start).dropout)
            past = self._past(key[:border], value[:border], reach, own_query.shape[0])
            outputs.append(attention(own_query, key[border:], value[border:], past, self.backend, dropout))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _parts(self, chunk: Chunk, tokens: int) -> list[slice]:
        """Cut a call into stretches of queries that share one rectangle of keys, none across a document's start."""
        step = part_tokens(self.window)
        return [
            slice(begin, min(begin + step, part.stop))
            for part in chunk.document_splits(tokens)
            for begin in range(part.start, part.stop, step)
        ]

    def _reach(self, chunk: Chunk) -> list[int]:
        """Return how many tokens before `chunk` each row's window reaches back."""
        return [min(max(start, 0), self.window - 1) for start in chunk.starts]

    def _past(self, keys: Tensor, values: Tensor, reach: list[int], tokens: int) -> list[Past]:
        """Return what lies before `tokens` queries, masked to what each of them sees.

        keys, values: [longest reach, batch, local kv_heads, head_dim]; reach: `_reach` of the first query.
        """
        longest = max(reach)
        if not longest:
            return []
        # column c lies `longest - c` tokens before the first query
        ages = torch.arange(longest, 0, -1, device=keys.device)
        visible: Tensor | None = None
        if longest + tokens > self.window:  # the first columns have left the windows of later queries
            rows = torch.arange(tokens, device=keys.device)
            visible = (ages + rows[:, None] < self.window)[None, None]
        if min(reach) < longest:
            own = (ages <= to_device(reach, keys.device)[:, None])[:, None, None]
            visible = own.expand(-1, -1, tokens, -1) if visible is None else visible & own
        return [Past(keys, values, visible)]
