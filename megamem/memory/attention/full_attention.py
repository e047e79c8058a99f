"""Full attention: causal softmax attention over all tokens of the document so far."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import torch
from pydantic import PositiveInt
from torch import Tensor

from megamem.config.cost import Flops, attention_flops
from megamem.config.model import MIXERS, MixerConfig, ModelConfig
from megamem.memory.base import Chunk, Growing, Losses, State, StateSpec, TensorSpec, to_device
from megamem.memory.shared.block_attention import (
    AttentionProjections,
    last_columns,
    local_attention_flops,
    open_specs,
)
from megamem.memory.shared.blocks import row_rotary_tables
from megamem.memory.shared.row_by_row import row_chunk
from megamem.ops.attention.softmax import Past, attention
from megamem.ops.slices import parts
from megamem.parallel.linears import Linears


@MIXERS.register
class FullAttentionConfig(MixerConfig):
    """Causal attention over the whole document so far; the state holds every key and value."""

    kind: Literal["full_attention"] = "full_attention"
    """`full_attention`"""
    max_chunks: PositiveInt | None = None
    """Past chunks kept, the oldest dropped first; all if not given. Bound it in streams mode."""

    def state_specs(self, model: ModelConfig) -> StateSpec:
        """Declare one entry of rotated keys and values per finished chunk, and the open chunk."""
        entry = TensorSpec(("chunk", "batch", "kv_heads", model.resolved_head_dim), shard="kv_heads")
        return {"past": Growing({"keys": entry, "values": entry}, self.max_chunks), **open_specs(model)}

    def query_key_norms(self) -> int:
        """See `MixerConfig.query_key_norms`."""
        return 1

    def mixing_flops(self, model: ModelConfig, sequence_length: int, causal: bool) -> dict[str, Flops]:
        """See `MixerConfig.mixing_flops`: attention to the past chunks in reach and within the own one."""
        chunks = -(-sequence_length // model.chunk_size)
        reach = chunks if self.max_chunks is None else self.max_chunks
        past = model.chunk_size * sum(min(chunk, reach) for chunk in range(chunks)) / chunks
        own = local_attention_flops(model.chunk_size, model, sequence_length, causal)["attention"]
        return {"attention": own + attention_flops(model.heads, model.resolved_head_dim, past)}

    def build(self, model: ModelConfig, linears: Linears, layer: int) -> FullAttention:
        """See `MixerConfig.build`."""
        return FullAttention(model, linears, self.state_specs(model), self.max_chunks)


class FullAttention(AttentionProjections):
    """Attention to a list of finished chunks, whose keys are stored once, rotated, and passed on by reference."""

    reads_borders = True

    def __init__(self, model: ModelConfig, linears: Linears, specs: StateSpec, max_chunks: int | None) -> None:
        super().__init__(model, linears, specs)
        self.chunk = model.chunk_size
        self.max_chunks = max_chunks

    def forward(self, hidden: Tensor, state: State, chunk: Chunk) -> tuple[Tensor, State, Losses]:
        """See `Mixer.forward`."""
        projections = self.project(hidden)
        sizes = self._parts(chunk, projections[0].shape[0], state["open_keys"].shape[0])
        outputs, done = [], 0
        # split, since the gradient of a slice by itself is as long as the call
        for query, key, value in zip(*(parts(x, sizes) for x in projections), strict=True):
            end = done + query.shape[0]
            output, state = self._attend(query, key, value, state, chunk.part(done, end))
            outputs.append(output)
            done = end
        mixed = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return self.output(mixed.flatten(2)), state, {}

    def _parts(self, chunk: Chunk, tokens: int, open_tokens: int) -> list[int]:
        """Return the tokens of each part of a call that attends at once: the call, or at most a chunk where that costs.

        A fused kernel without a mask passes over what lies behind a query; scores or a mask over several chunks would
        be large, and half of them for nothing.
        """
        drops = self.dropout(chunk.dropout) is not None
        masked = chunk.borders is None and len(set(self._reach(chunk.starts))) > 1
        if self.max_chunks is None and self.backend != "eager" and not drops and not masked:
            return [tokens]
        parts: list[int] = []
        while (done := sum(parts)) < tokens:
            here = chunk.after(done)
            # not across the end of the open chunk, so that all entries have one length
            part = min(tokens - done, self.chunk - (open_tokens + done) % self.chunk)
            if self.max_chunks is not None:
                # nor across a chunk border of any row, where its reach changes, or into another document
                borders = (self.chunk - start % self.chunk for start in here.starts)
                part = min(here.document_splits(part)[0].stop, *borders)
            parts.append(part)
        return parts

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, state: State, chunk: Chunk) -> tuple[Tensor, State]:
        """Attend from some tokens to the past and among themselves; append them to the open chunk.

        query [tokens, batch, local heads, head_dim]; key, value [tokens, batch, local kv_heads, head_dim].
        """
        tokens = query.shape[0]
        tables = row_rotary_tables(chunk, query.shape[0], self.width, self.rotation, query)
        query, key = (self.apply_rotary(x, *tables) for x in (query, key))
        open_keys, open_values = state["open_keys"], state["open_values"]
        before = [*((e["keys"], e["values"]) for e in state["past"]), (open_keys, open_values)]
        seen = self.scaled_query(query), *self.local(key, value)
        if chunk.borders is None:
            output = attention(*seen, self._visible(before, chunk), self.backend, self.dropout(chunk.dropout))
        else:
            output = self._row_by_row(seen, before, chunk)
        if open_keys.shape[0]:
            key, value = torch.cat((open_keys, key)), torch.cat((open_values, value))
        pieces = zip(key.split(self.chunk), value.split(self.chunk), strict=True)
        entries = [{"keys": keys, "values": values} for keys, values in pieces]
        closed, rest = divmod(key.shape[0], self.chunk)
        key, value = last_columns(key, rest), last_columns(value, rest)
        if self.max_chunks is not None:  # views would keep what is forgotten alive, as parts of the whole call
            entries = [{name: x.clone() for name, x in entry.items()} for entry in entries[:closed]]
            key, value = key.clone(), value.clone()
        past = [*state["past"], *entries[:closed]]
        return output, {
            "past": self._bounded(past, key.shape[0], chunk.after(tokens)),
            "open_keys": key,
            "open_values": value,
        }

    def _row_by_row(
        self, seen: tuple[Tensor, Tensor, Tensor], entries: list[tuple[Tensor, Tensor]], chunk: Chunk
    ) -> Tensor:
        """Attend in each row from each document to itself, and from the first one to the past.

        seen: query, key and value [tokens, batch, ...]; entries: keys and values of the past. Returns: like the query.
        """
        assert chunk.borders is not None
        rows = []
        for row, places in enumerate(chunk.borders):
            own, here = slice(row, row + 1), row_chunk(chunk, row)
            past = [(keys[:, own], values[:, own]) for keys, values in entries]
            visible = self._visible(past, Chunk(chunk.starts[own]))
            parts = []
            for begin, end in pairwise((0, *places, seen[0].shape[0])):
                query, key, value = (x[begin:end, own] for x in seen)
                dropout = self.dropout(here.after(begin).dropout)
                parts.append(attention(query, key, value, () if begin else visible, self.backend, dropout))
            rows.append(torch.cat(parts))
        return torch.cat(rows, dim=1)

    def _reach(self, starts: tuple[int, ...]) -> list[int]:
        """Return how many tokens before its position each row may see."""
        if self.max_chunks is None:
            return [max(start, 0) for start in starts]
        window = self.max_chunks * self.chunk
        return [min(start, start % self.chunk + window) if start > 0 else 0 for start in starts]

    def _visible(self, entries: list[tuple[Tensor, Tensor]], chunk: Chunk) -> list[Past]:
        """Mask entries of keys and values [tokens, batch, ...] to the columns within each row's reach.

        These are the newest columns, of the row's own document; entries that no row reaches are left out.
        """
        parts: list[Past] = []
        distance = 0  # columns newer than the entry
        for keys, values in reversed(entries):
            size = keys.shape[0]
            reach = [min(max(tokens - distance, 0), size) for tokens in self._reach(chunk.starts)]
            distance += size
            if not any(reach):
                continue
            if len(set(reach)) == 1:
                keys, values, visible = keys[size - reach[0] :], values[size - reach[0] :], None
            elif all(r in (0, size) for r in reach):
                visible = to_device([r == size for r in reach], keys.device, torch.bool)
            else:
                columns = torch.arange(size, 0, -1, device=keys.device)[:, None]
                visible = columns <= to_device(reach, keys.device)
            parts.append(Past(keys, values, visible))
        return parts[::-1]

    def _bounded(self, past: list[dict[str, Tensor]], open_tokens: int, chunk: Chunk) -> list[dict[str, Tensor]]:
        """Return the entries [tokens, batch, ...] in some row's reach; `open_tokens` of it are in the open chunk."""
        needed = -(-max(0, max(self._reach(chunk.starts)) - open_tokens) // self.chunk)
        return past[max(len(past) - needed, 0) :]
