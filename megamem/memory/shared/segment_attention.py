"""Attention of a chunk's tokens to their chunk and to hidden vectors kept before it: segment recurrence.

The base of Transformer-XL and of the memories that stand behind its cache. Keys and values are made of the columns

    [ kept before the cache | cache m | open chunk | tokens of the call ]

of which a query sees those that its row's document has written, up to its own. Each column is one distance further
back.

Letters of shapes: T tokens of the call, M columns of the cache, B batch rows, H local heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megamem.config.cost import Flops, attention_flops, fixed_product, product
from megamem.config.model import ModelConfig
from megamem.memory.base import Chunk, Losses, State, StateSpec, TensorSpec, detach, state_dtype, to_device
from megamem.memory.shared.block_attention import AttentionProjections, last_columns
from megamem.memory.shared.blocks import BlockSlice, block_slices, split_tokens
from megamem.memory.shared.row_by_row import row_chunk
from megamem.ops.attention.relative import relative_attention, relative_shares, sinusoids
from megamem.ops.slices import slices
from megamem.parallel.linears import Linears, declare, normal


def segment_specs(memory_length: int) -> dict[str, TensorSpec]:
    """Declare the cached hidden vectors, the newest last and zeros where nothing has come yet, and the open chunk's.

    Every rank holds them whole: its own heads' keys and values are made of them each time they are read.
    """
    return {
        "memory": TensorSpec((memory_length, "batch", "hidden")),
        "open_hidden": TensorSpec(("open", "batch", "hidden"), kind="open"),
    }


def segment_flops(
    model: ModelConfig, sequence_length: int, causal: bool, columns: Callable[[int], int], window: int | None
) -> dict[str, Flops]:
    """Return the FLOPs per token of attention to the chunk and a cache before it; see `MixerConfig.mixing_flops`.

    The cache is projected again in every chunk and has no gradient itself. Distances are projected once per micro-batch
    and counted for one of a single row.

    Args:
        columns: from the tokens before a chunk to the columns that it sees in front of it.
        window: keys that a query sees at most; None: all.
    """
    segment = min(model.chunk_size, sequence_length)
    begins = range(0, sequence_length, segment)
    cached = [columns(begin) for begin in begins]
    if causal:
        keys = sum(min(m + i + 1, window or m + i + 1) for m in cached for i in range(segment)) / len(cached) / segment
        by_distance = keys
    else:
        keys = sum(cached) / len(cached) + segment
        by_distance = keys + 1
    heads, kv_heads = (n * model.resolved_head_dim for n in (model.heads, model.resolved_kv_heads))
    per_token = sum(cached) / len(cached) / segment
    return {
        "attention": attention_flops(model.heads, model.resolved_head_dim, keys) + product(2 * heads * by_distance),
        "memory_projection": fixed_product(2 * model.hidden_size * 2 * kv_heads * per_token),
        "distance_projection": fixed_product(2 * model.hidden_size * heads * (per_token + 1 + 1 / segment)),
    }


def segment_parameters(model: ModelConfig) -> int:
    """Return the number of parameters of W_r, u and v."""
    return (model.hidden_size + 2) * model.heads * model.resolved_head_dim


def bias_parameters(model: ModelConfig) -> int:
    """Return the number of parameters of u and v."""
    return 2 * model.heads * model.resolved_head_dim


class ScoreBiases(nn.Module):
    """The vectors u and v of each head: what every query asks for, by content and by distance.

    Where queries look ahead, another v may stand for distances in that direction. A module of its own, which is called:
    ZeRO 3 gathers a parameter by hooks of the module that owns it.
    """

    def __init__(self, heads: int, width: int, std: float, ahead: bool = False) -> None:
        super().__init__()
        self.content = declare(nn.Parameter(torch.empty(heads, width)), normal(std), shard_axis=0)
        self.distance = declare(nn.Parameter(torch.empty(heads, width)), normal(std), shard_axis=0)
        self.ahead = declare(nn.Parameter(torch.empty(heads, width)), normal(std), shard_axis=0) if ahead else None

    def forward(self, query: Tensor, rows: int = 0) -> tuple[Tensor, ...]:
        """Return q + u [T, B, H, D] and q + v [T - rows, B, H, D] of a query [T, B, H, D].

        rows: how many of the first queries look ahead; if there are any, their q + v [rows, B, H, D] comes third.
        """
        content = query + self.content
        if not rows:
            return content, query + self.distance
        looking, others = query.split((rows, query.shape[0] - rows))
        return content, others + self.distance, looking + (self.distance if self.ahead is None else self.ahead)


@lru_cache(maxsize=32)
def unseen_keys(
    tokens: int, keys: int, window: int | None, hidden: tuple[int, ...] | None, device: torch.device
) -> Tensor:
    """Return which keys a query does not see: those behind it, and what is masked in front. Cached for all layers.

    Args:
        tokens: number of queries; the last key is the last query's own.
        keys: number of keys.
        window: keys that a query sees at most, its own included; None: all.
        hidden: how many of the first keys each batch row does not see; None: all rows see all.
        device: where the result lies.
    Returns: bool [tokens, keys], or [batch, tokens, keys] where rows are masked.
    """
    with torch.inference_mode(False):
        columns = torch.arange(keys, device=device)
        distances = torch.arange(keys - tokens, keys, device=device)[:, None] - columns
        unseen = distances < 0
        if window is not None:
            unseen = unseen | (distances >= window)
        return unseen if hidden is None else unseen | (columns < to_device(hidden, device)[:, None, None])


class Observer(Protocol):
    """The interface of what looks on while a layer attends, to report where to."""

    def attended(self, shares: Tensor, unseen: Tensor) -> None:
        """Take what tokens give to each column up to their own, shares [B, H, T, C]; unseen: `unseen_keys`."""

    def looked_ahead(self, shares: Tensor, unseen: Tensor) -> None:
        """Take what memory rows give to the newest places, shares [B, H, M, C]; unseen: `unseen_ahead`."""

    def mixed(self, share: Tensor) -> None:
        """Take the share of what memory rows have read before in what they put out, [M, B, H]."""


class SegmentAttention(AttentionProjections):
    """Softmax attention with relative positions to the chunk so far and to hidden vectors cached before it."""

    reads_borders = True
    differentiable_state = False
    remembers_keys = False
    counts_attention = False
    """Whether `mix` sums up the attention that each column gets."""
    observer: Observer | None = None
    """Set by `observed_by` alone."""

    def __init__(
        self,
        model: ModelConfig,
        linears: Linears,
        specs: StateSpec,
        *,
        memory_length: int,
        same_length: bool = False,
        clamp_length: int | None = None,
        shares_biases: bool = False,
        biases_ahead: bool = False,
    ) -> None:
        """Build the projections.

        Args:
            model: the model as its layers see it.
            linears: makes the projections.
            specs: the declared state, with `segment_specs`.
            memory_length: hidden vectors in the cache.
            same_length: whether every query sees `memory_length` keys, its own included.
            clamp_length: distances beyond are taken for this one; None: none.
            shares_biases: whether u and v are those of all such layers of a model, which hands them over when it is
                built (`share_biases`). A layer outside of a model has its own.
            biases_ahead: whether there is another v for queries that look ahead.
        """
        super().__init__(model, linears, specs)
        self.segment = model.chunk_size
        self.memory_length = memory_length
        self.window = memory_length if same_length else None
        self.clamp_length = clamp_length
        self.table_dropout = model.dropout
        init = normal(model.init_std)
        self.distance_key = linears.column(model.hidden_size, model.heads * self.width, init)
        self.biases = ScoreBiases(model.heads // linears.tp_size, self.width, model.init_std, biases_ahead)
        self.shares_biases = shares_biases
        # in a tuple, so that the module is not registered as the layer's own
        self._shared: tuple[ScoreBiases, ...] = ()

    def share_biases(self, biases: ScoreBiases) -> None:
        """Use the model's u and v instead of its own, which are dropped."""
        del self.biases
        self._shared = (biases,)

    def biased(self, query: Tensor, rows: int = 0) -> tuple[Tensor, ...]:
        """Return q + u and q + v of a query [T, B, H, D], see `ScoreBiases.forward`."""
        biases = self._shared[0] if self._shared else self.biases
        # shared ones lie on another device where layers are spread over several
        return tuple(biased.to(query.device) for biased in biases(query, rows))

    @contextmanager
    def observed_by(self, observer: Observer) -> Iterator[None]:
        """Show what this rank's heads attend to to `observer`, inside a `with` statement."""
        self.observer = observer
        try:
            yield
        finally:
            self.observer = None

    def columns_before(self, finished_tokens: int) -> int:
        """Return how many columns a row sees in front of its open chunk, after so many tokens in finished chunks."""
        return min(finished_tokens, self.memory_length)

    def _seen(self, part: BlockSlice) -> int:
        """Return how many columns some row of a part sees in front of its open chunk."""
        return max(map(self.columns_before, part.finished_tokens))

    def kept(self, state: State) -> Tensor:
        """Return all columns of the state in front of the open chunk, the newest last: [columns, B, hidden_size]."""
        cache: Tensor = state["memory"]
        return cache

    def forward(self, hidden: Tensor, state: State, chunk: Chunk) -> tuple[Tensor, State, Losses]:
        """See `Mixer.forward`."""
        x = self.linears.enter(hidden)
        mixed, state, _ = self.mix(x, self.queries(x), detach(state), chunk)
        return self.output(mixed.flatten(2)), state, {}

    def mix(self, x: Tensor, query: Tensor, state: State, chunk: Chunk) -> tuple[Tensor, State, Tensor | None]:
        """Attend from the tokens of a call or of a part of one, and write the state.

        x: the tokens [T, B, hidden_size]; query: `queries` of them [T, B, H, D].
        Returns: what the heads put out [T, B, H, D]; the new state; where `counts_attention` says so, the attention of
        all local heads to the cache, [M, B].
        """
        parts = block_slices(chunk, x.shape[0], self.segment)
        # columns that no row sees are left out
        seen = self._seen(parts[0])
        open_tokens = state["open_hidden"].shape[0]
        before = torch.cat((last_columns(self.kept(state), seen), state["open_hidden"]))
        own_keys, own_values = self.local(self.keys(x), self.heads_of(self.value, x))
        # what came with the state passes no gradient on, so it is projected by itself; where nothing has come too, as
        # ZeRO 3 gathers the projections from all ranks whenever one uses them
        keys = torch.cat((self.keys(before), own_keys))
        values = torch.cat((self.heads_of(self.value, before), own_values))
        queries = self.biased(self.scaled_query(query))
        # no query looks further back than over the columns of its own part
        most = max(self._seen(part) + max(part.offsets) + part.tokens for part in parts)
        distance_keys = self._distance_keys(min(most, keys.shape[0]), x, chunk)
        if all(len({*part.offsets}) == 1 for part in parts) and parts[0].offsets[0] == open_tokens:
            mixed, received = self._read(queries, keys, values, distance_keys, parts)
        else:
            rows, of_rows = [], []
            for row in range(chunk.rows):
                of_row = slice(row, row + 1)
                own = block_slices(row_chunk(chunk, row), x.shape[0], self.segment)
                # in front of the row's own open columns stand those of other rows
                foreign = open_tokens - own[0].offsets[0]
                row_keys, row_values = (_without(y[:, of_row], seen, foreign) for y in (keys, values))
                row_queries = tuple(y[:, of_row] for y in queries)
                row_mixed, row_received = self._read(row_queries, row_keys, row_values, distance_keys, own)
                rows.append(row_mixed)
                of_rows.append(row_received)
            mixed = torch.cat(rows, dim=1)
            received = torch.cat([row_received[:seen] for row_received in of_rows], dim=1)
        return mixed, self._written(x, state, chunk), self._of_cache(received[:seen])

    def _of_cache(self, received: Tensor) -> Tensor | None:
        """Return the attention [columns, B] to columns in front of the open chunk, of the cache alone: [M, B]."""
        if not self.counts_attention:
            return None
        cached = last_columns(received, min(self.memory_length, received.shape[0]))
        return F.pad(cached, (0, 0, self.memory_length - cached.shape[0], 0))

    def _distance_keys(self, columns: int, like: Tensor, chunk: Chunk) -> Tensor:
        """Return W_r s_d of the distances columns, ..., 1, 0: [columns + 1, H, D].

        like: x [T, B, hidden_size]; chunk: its place. Dropout is the same in all rows and calls of an optimizer step.
        """
        table = sinusoids(columns + 1, self.clamp_length, like.shape[2], like.dtype, like.device)
        if (drops := chunk.drops(self.table_dropout, "distances")) is not None:
            table = drops.table(table)
        return self.heads_of(self.distance_key, table[:, None])[:, 0]

    def _read(
        self,
        queries: tuple[Tensor, ...],
        keys: Tensor,
        values: Tensor,
        distance_keys: Tensor,
        parts: list[BlockSlice],
    ) -> tuple[Tensor, Tensor]:
        """Attend slice by slice; all rows are at the same place of their chunks.

        Args:
            queries: q + u and q + v, [T, B, H, D].
            keys, values: of the columns before the call and of the call, [columns, B, kv heads, D].
            distance_keys: `_distance_keys`.
            parts: `block_slices` of the call.
        Returns: [T, B, H, D]; the attention to each column [columns, B], zeros unless `counts_attention`.
        """
        before, outputs = keys.shape[0] - queries[0].shape[0], []
        received = torch.zeros(keys.shape[:2], dtype=state_dtype(keys.dtype), device=keys.device)
        columns = [slice(before + part.begin - part.offsets[0] - self._seen(part), before + part.end) for part in parts]
        for part, (content, distance), here, own_keys, own_values in zip(
            parts, split_tokens(parts, *queries), columns, slices(keys, columns), slices(values, columns), strict=True
        ):
            longest, length = self._seen(part), own_keys.shape[0]
            not_seen = tuple(longest - self.columns_before(tokens) for tokens in part.finished_tokens)
            hidden = not_seen if any(not_seen) else None
            unseen = unseen_keys(part.tokens, length, self.window, hidden, keys.device)
            of_distances = distance_keys[distance_keys.shape[0] - length - 1 :]
            if self.observer is not None:
                shares = relative_shares(content, distance, own_keys, of_distances, unseen)
                self.observer.attended(shares, unseen)
            output, counted, _ = relative_attention(
                content, distance, own_keys, own_values, of_distances, unseen,
                fused=self.backend != "eager", count=self.counts_attention, dropout=self.dropout(part.dropout),
            )  # fmt: skip
            outputs.append(output)
            if counted is not None:
                received[here] += counted
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs), received

    def _written(self, x: Tensor, state: State, chunk: Chunk) -> State:
        """Return the state after the call's tokens x [T, B, hidden_size]."""
        end = BlockSlice(0, 0, chunk.after(x.shape[0]).starts, self.segment)
        begin = BlockSlice(0, 0, chunk.starts, self.segment)
        open_before, open_after = state["open_hidden"].shape[0], max(end.offsets)
        columns = torch.cat((state["memory"], state["open_hidden"], x))
        if {*begin.offsets} == {open_before} and {*end.offsets} == {open_after}:
            memory = columns[: columns.shape[0] - open_after]
            new = {
                "memory": last_columns(memory, self.memory_length),
                "open_hidden": last_columns(columns, open_after),
            }
        else:
            cached, opened = [], []
            for row, (before, after) in enumerate(zip(begin.offsets, end.offsets, strict=True)):
                own = _without(columns[:, row : row + 1], self.memory_length, open_before - before)
                cached.append(last_columns(own[: own.shape[0] - after], self.memory_length))
                # other rows have more open columns: in front of this row's own stand some that nobody reads
                opened.append(F.pad(last_columns(own, after), (0, 0, 0, 0, open_after - after, 0)))
            new = {"memory": torch.cat(cached, dim=1), "open_hidden": torch.cat(opened, dim=1)}
        if chunk.begins_inside or min(chunk.starts) < 0:
            # what stands before the document's own tokens is another document's, or padding
            ages = torch.arange(self.memory_length, 0, -1, device=x.device)[:, None]
            new["memory"] = new["memory"].where((ages <= to_device(end.finished_tokens, x.device))[..., None], 0.0)
        # copies: views would keep all columns alive
        return {name: columns.clone() for name, columns in new.items()}


def _without(columns: Tensor, before: int, foreign: int) -> Tensor:
    """Return columns [columns, B, ...] without the `foreign` ones behind the first `before`."""
    return torch.cat((columns[:before], columns[before + foreign :])) if foreign else columns
