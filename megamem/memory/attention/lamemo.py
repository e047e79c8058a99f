"""LaMemo: memory rows that are made anew for each segment, having looked ahead to its first token.

Ji et al., "LaMemo: Language Modeling with Look-Ahead Memory", 2022. Its segment is the chunk of N tokens. With the
first token of a chunk come M side rows m_0 .. m_(M-1), one for each of the newest tokens before it. They stand at
places 0 .. M-1, the chunk's first token at place M. At the bottom rows are embeddings; each layer makes them anew for
the one above it, and they are that layer's keys and values for all tokens of the chunk. One layer, for each head of
width D:

    q, k, v    = W_q x, W_k x, W_v x            of x = [m; h], rows and tokens alike
    tokens     A_ij = ((q_i + u) . k_j + (q_i + v+) . r_(i-j)) / sqrt(D),    j <= i     over rows and tokens
    rows       A_ij = ((q_i + u) . k_j + (q_i + v-) . r_(j-i)) / sqrt(D),    i < j <= M
               over the newest min(N, M) of the places 1 .. M
               s = sum_j exp(A_ij),  c = sum_j exp(A_ij) v_j / s                 s', c': of the look-ahead
    mixture    a = s / (s + s' + epsilon),  c_i = a stop(c) + (1 - a) c'         s, c: recorded, s <- s + s'
    then       W_o [c; c_tokens], the residual, norms and the MLP, for rows and tokens together

    layer l + 1   m m m | x x x x      the rows that a layer puts out are read by the next one
                  ▲ ▲ ▲   ▲
    layer l       m m m | x x x x      what rows and tokens read of earlier places is recorded, without gradients:
    embedding     e e e | t t t t      vectors c and logarithms of s, for the newest M places

Over the chunks that a token stays in the memory it looks ahead to each later token once: a chunk's look-ahead ends with
the next one's first token. The topmost layer has rows to read and nobody to make them for.

Letters of shapes: M rows, T tokens of the call, C columns of keys, B batch rows, H local heads, D head_dim.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import PositiveInt
from torch import Tensor

from megamem.config.cost import Flops, attention_flops, fixed_product, product
from megamem.config.model import MIXERS, MixerConfig, ModelConfig
from megamem.config.side_rows import SideRows
from megamem.memory.base import Chunk, Losses, State, StateSpec, TensorSpec, detach, to_device
from megamem.memory.shared.block_attention import last_columns, open_specs
from megamem.memory.shared.recent_tokens import recent_specs
from megamem.memory.shared.segment_attention import (
    SegmentAttention,
    bias_parameters,
    segment_parameters,
    unseen_keys,
)
from megamem.ops.attention.look_ahead import (
    interpolate,
    look_ahead_attention,
    look_ahead_shares,
    share_of_old,
    unseen_ahead,
)
from megamem.ops.attention.relative import relative_attention, relative_shares, sinusoids
from megamem.parallel.linears import Linears


@MIXERS.register
class LaMemoConfig(MixerConfig):
    """Attention to the chunk and to memory rows that have looked ahead to its first token."""

    kind: Literal["lamemo"] = "lamemo"
    """`lamemo`"""
    memory_length: PositiveInt | None = None
    """Tokens before the chunk that have memory rows; as many as the chunk has if not given."""
    look_ahead: bool = True
    """Whether rows attend to what came behind them; if not, they are made of what they read when they were tokens."""
    interpolate: bool = True
    """Whether what rows read before is mixed with what they see ahead; if not, it is forgotten."""
    positions: Literal["disentangled", "transformer_xl"] = "disentangled"
    """How the look-ahead counts places: `disentangled` with a v of its own and distances as they are, `transformer_xl`
    with the v of the other direction and negative distances."""
    order_mask: bool = True
    """Whether a row attends to later places only; if not, to all of the newest ones, to earlier ones and
    also to itself."""
    shared_biases: bool = False
    """Whether all layers share u, v⁺ and v⁻, as in the paper's experiments; if not, each has its own. They are learned
    vectors, added to queries: u in scores by content, v⁺ and v⁻ in scores by distance, back and ahead."""

    def resolved(self, model: ModelConfig) -> int:
        """Return the number of memory rows."""
        return self.memory_length or model.chunk_size

    @property
    def has_own_bias(self) -> bool:
        """Whether the look-ahead has a v of its own."""
        return self.look_ahead and self.positions == "disentangled"

    @property
    def records(self) -> bool:
        """Whether layers record what places read."""
        return self.interpolate or not self.look_ahead

    def side_rows(self, model: ModelConfig) -> SideRows:
        """See `MixerConfig.side_rows`."""
        return SideRows(self.resolved(model), "begin", "tokens")

    def entry_specs(self, model: ModelConfig) -> StateSpec:
        """See `MixerConfig.entry_specs`."""
        return recent_specs(self.resolved(model))

    def state_specs(self, model: ModelConfig) -> StateSpec:
        """Declare what was recorded of the newest places, and keys and values of the open chunk and its rows.

        Logarithms of sums add up over chunks, so they are FP32.
        """
        length, specs = self.resolved(model), open_specs(model)
        if self.records:
            specs["records"] = TensorSpec((length, "batch", "heads", model.resolved_head_dim), shard="heads")
        if self.records and self.look_ahead:
            specs["log_sums"] = TensorSpec((length, "batch", "heads"), dtype="float32", shard="heads")
        return specs

    def top_state_specs(self, model: ModelConfig) -> StateSpec:
        """See `MixerConfig.top_state_specs`: nobody reads what the topmost layer would make of the rows."""
        return open_specs(model)

    def shared_parameters(self, model: ModelConfig) -> int:
        """See `MixerConfig.shared_parameters`."""
        return bias_parameters(model) if self.shared_biases else 0

    def shared_rising_parameters(self, model: ModelConfig) -> int:
        """See `MixerConfig.shared_rising_parameters`."""
        return self.rising_parameters(model) if self.shared_biases else 0

    def rising_parameters(self, model: ModelConfig) -> int:
        """See `MixerConfig.rising_parameters`: v of the look-ahead."""
        return model.heads * model.resolved_head_dim if self.has_own_bias else 0

    def extra_parameters(self, model: ModelConfig) -> int:
        """Count the projection of distances, u and both v."""
        return segment_parameters(model) + self.rising_parameters(model)

    def rotates(self) -> bool:
        """See `MixerConfig.rotates`: positions are distances."""
        return False

    def query_key_norms(self) -> int:
        """See `MixerConfig.query_key_norms`."""
        return 1

    def mixing_flops(self, model: ModelConfig, sequence_length: int, causal: bool) -> dict[str, Flops]:
        """See `MixerConfig.mixing_flops`: of a layer whose rows are read above, per row or token."""
        length = self.resolved(model)
        share = model.chunk_size / (model.chunk_size + length)
        parts = self._token_flops(model, round(share * sequence_length), causal)
        if self.look_ahead:
            parts["look_ahead"] = self._look_ahead_flops(model, round(share * sequence_length), causal)
        else:
            # rows ask for nothing, but are counted with all projections of a layer
            queries = 2 * model.hidden_size * model.heads * model.resolved_head_dim
            parts["projections"] = product(-queries * length / model.chunk_size)
        if self.look_ahead and self.positions == "transformer_xl":
            table = 2 * model.hidden_size * model.heads * model.resolved_head_dim * self._distances_ahead(model)
            parts["distance_projection"] += fixed_product(table / model.chunk_size)
        return {name: Flops(share * flops.forward, share * flops.backward) for name, flops in parts.items()}

    def top_mixing_flops(self, model: ModelConfig, sequence_length: int, causal: bool) -> dict[str, Flops]:
        """See `MixerConfig.top_mixing_flops`: rows are projected to keys and values, and that is all."""
        keys = 2 * model.resolved_kv_heads * model.resolved_head_dim
        projection = product(2 * model.hidden_size * keys * self.resolved(model) / model.chunk_size)
        return {**self._token_flops(model, sequence_length, causal), "memory_projection": projection}

    def _token_flops(self, model: ModelConfig, sequence_length: int, causal: bool) -> dict[str, Flops]:
        """Return the FLOPs per token of attention from tokens, and of projecting distances."""
        segment, length = min(model.chunk_size, sequence_length), self.resolved(model)
        cached = [min(begin, length) for begin in range(0, sequence_length, segment)]
        keys = sum(cached) / len(cached) + (segment + 1) / 2 if causal else length + segment
        heads = model.heads * model.resolved_head_dim
        by_distance = keys if causal else keys + 1
        table = 2 * model.hidden_size * heads * (length + segment + 1) / segment
        return {
            "attention": attention_flops(model.heads, model.resolved_head_dim, keys) + product(2 * heads * by_distance),
            "distance_projection": fixed_product(table),
        }

    def _distances_ahead(self, model: ModelConfig) -> int:
        """Return the number of distances that rows look ahead at."""
        return self.resolved(model) * (1 if self.order_mask else 2) + 1

    def _look_ahead_flops(self, model: ModelConfig, sequence_length: int, causal: bool) -> Flops:
        """Return the FLOPs per token of attention from rows, which see what lies between them and the chunk's start."""
        segment, length = min(model.chunk_size, sequence_length), self.resolved(model)
        reach = min(model.chunk_size, length)
        filled = [min(begin, length) for begin in range(0, sequence_length, segment)]
        pairs: float
        distances: float
        if not causal:
            pairs, distances = length * reach, length * (length + (1 if self.order_mask else reach))
        elif self.order_mask:
            pairs = distances = sum(sum(min(age, reach) for age in range(1, c + 1)) for c in filled) / len(filled)
        else:
            pairs = distances = sum(rows * min(rows + 1, reach) for rows in filled) / len(filled)
        heads = model.heads * model.resolved_head_dim
        by_distance = product(2 * heads * distances / segment)
        return attention_flops(model.heads, model.resolved_head_dim, pairs / segment) + by_distance

    def build(self, model: ModelConfig, linears: Linears, layer: int) -> LaMemo:
        """See `MixerConfig.build`."""
        return LaMemo(self, model, linears, rises=model.rows_rise_from(layer))


class LaMemo(SegmentAttention):
    """Attention to memory rows, which come with the first token of a chunk, and to the chunk so far."""

    reads_borders = True

    def __init__(self, config: LaMemoConfig, model: ModelConfig, linears: Linears, rises: bool) -> None:
        """Build the mixer of a layer; rises: whether a layer above reads the rows that leave it."""
        super().__init__(
            model,
            linears,
            config.state_specs(model) if rises else config.top_state_specs(model),
            memory_length=config.resolved(model),
            shares_biases=config.shared_biases,
            biases_ahead=rises and config.has_own_bias,
        )
        self.rises = rises
        self.config = config
        self.reach = min(self.memory_length, self.segment)
        """How many of the newest places rows look ahead to."""

    def forward(self, hidden: Tensor, state: State, chunk: Chunk) -> tuple[Tensor, State, Losses]:
        """See `Mixer.forward`; a call ends at a chunk's border at the latest.

        hidden: [rows and T, B, hidden_size], with the rows where a chunk begins. What the topmost layer returns has no
        rows.
        """
        state = detach(state)
        x, rows = self.linears.enter(hidden), chunk.rows_before
        keys, values = self._columns(x, rows, state)
        # rows that have no token yet are seen by nobody
        tokens, place = x.shape[0] - rows, chunk.starts[0] % self.segment
        before = keys.shape[0] - tokens
        columns = before - min(place, before)
        hidden_rows = tuple(columns - min(max(start - place, 0), columns) for start in chunk.starts)
        masked = hidden_rows if any(hidden_rows) else None
        # the topmost layer asks for tokens only
        looking = rows if self.rises and self.config.look_ahead else 0
        queries = self.biased(self.scaled_query(self.queries(x if looking else x[rows:])), looking)
        distance_keys = self._distance_keys(keys.shape[0], x, chunk)
        unseen = unseen_keys(tokens, keys.shape[0], None, masked, keys.device)
        if self.observer is not None:
            shares = relative_shares(queries[0][looking:], queries[1], keys, distance_keys, unseen)
            self.observer.attended(shares, unseen)
        read = relative_attention(
            queries[0][looking:], queries[1], keys, values, distance_keys, unseen,
            fused=self.backend != "eager", dropout=self.dropout(chunk.dropout), log_sums="log_sums" in self.specs,
        )  # fmt: skip
        mixed, new = read.out, self._open(keys, values, chunk.starts[0] + tokens)
        renewed = {name: state[name] for name in ("records", "log_sums") if name in self.specs}
        if rows and self.rises:
            ahead = (queries[0][:looking], queries[2]) if looking else None
            rows_read, renewed = self._renewed(ahead, keys, values, distance_keys, state, chunk, masked)
            mixed = torch.cat((rows_read, mixed))
        for name, past in renewed.items():
            own = read.out if name == "records" else read.log_sums
            assert own is not None
            new[name] = self._newest(past.detach(), own.detach())
        return self.output(mixed.flatten(2)), new, {}

    def _columns(self, x: Tensor, rows: int, state: State) -> tuple[Tensor, Tensor]:
        """Return keys and values [C, B, kv heads, D] of rows, the open chunk and the call.

        x: rows and tokens of the call [rows and T, B, hidden_size].
        """
        key, value = self.keys(x), self.heads_of(self.value, x)
        own = key[rows:], value[rows:]
        seen = self.local(*own)
        if seen[0] is not own[0]:
            key, value = torch.cat((key[:rows], seen[0])), torch.cat((value[:rows], seen[1]))
        if state["open_keys"].shape[0]:
            key, value = torch.cat((state["open_keys"], key)), torch.cat((state["open_values"], value))
        return key, value

    def _open(self, keys: Tensor, values: Tensor, end: int) -> State:
        """Return what later calls of the chunk read, of keys and values [C, B, kv heads, D].

        end: position of the next token in its document.
        """
        kept = keys.shape[0] if end % self.segment else 0
        return {
            "open_keys": last_columns(keys.detach(), kept),
            "open_values": last_columns(values.detach(), kept),
        }

    def _renewed(
        self,
        queries: tuple[Tensor, Tensor] | None,
        keys: Tensor,
        values: Tensor,
        distance_keys: Tensor,
        state: State,
        chunk: Chunk,
        masked: tuple[int, ...] | None,
    ) -> tuple[Tensor, State]:
        """Return what rows read [M, B, H, D], and what is recorded of it.

        Args:
            queries: q + u and q + v- of the rows, [M, B, H, D]; None where they do not look ahead.
            keys, values: of rows and tokens, [C, B, kv heads, D].
            distance_keys: `_distance_keys`.
            state: before the chunk.
            chunk: where the call lies.
            masked: how many of the first rows are seen by nobody, for each batch row; None: all are seen.
        """
        if queries is None:
            return state["records"], {"records": state["records"]}
        length, ordered = self.memory_length, self.config.order_mask
        newest = slice(length + 1 - self.reach, length + 1)
        keys_ahead = self._distance_keys_ahead(distance_keys, queries[0], chunk)
        unseen = unseen_ahead(length, self.reach, ordered, masked, keys.device)
        if self.observer is not None:
            self.observer.looked_ahead(look_ahead_shares(*queries, keys[newest], keys_ahead, unseen, ordered), unseen)
        ahead = look_ahead_attention(
            *queries, keys[newest], values[newest], keys_ahead, unseen, ordered,
            fused=self.backend != "eager",
            dropout=self.dropout(chunk.dropout, "look_ahead", rows_before=length),
        )  # fmt: skip
        if "log_sums" not in self.specs:
            return ahead.out, {}
        assert ahead.log_sums is not None
        if self.observer is not None:
            self.observer.mixed(share_of_old(state["log_sums"], ahead.log_sums)[0])
        read, sums = interpolate(state["records"], state["log_sums"], ahead.out, ahead.log_sums)
        recorded = {"records": read.detach(), "log_sums": sums.detach()}
        if masked is not None:
            # rows without a token stay zero, whatever they have read
            places = torch.arange(length, device=read.device)[:, None]
            filled = (places >= to_device(masked, read.device))[..., None]
            recorded = {
                "records": recorded["records"].where(filled[..., None], 0.0),
                "log_sums": recorded["log_sums"].where(filled, 0.0),
            }
        return read, recorded

    def _distance_keys_ahead(self, distance_keys: Tensor, like: Tensor, chunk: Chunk) -> Tensor:
        """Return what rows read by distance ahead, 0, 1, ..., M, or -M, ..., M without a mask: [distances, H, D].

        distance_keys: of the distances ..., 1, 0 [C + 1, H, D]; like: [M, B, H, D]; chunk: where the call lies.
        """
        length = self.memory_length
        if self.config.positions == "disentangled":
            backward = last_columns(distance_keys, length + 1)
            ascending = backward.flip(0)
            return ascending if self.config.order_mask else torch.cat((backward[:-1], ascending))
        # sines are odd and cosines even
        backward = sinusoids(length + 1, None, self.sizes["hidden"], like.dtype, like.device)
        sines, cosines = backward.flip(0).chunk(2, dim=1)
        table = torch.cat((-sines, cosines), dim=1)
        if not self.config.order_mask:
            table = torch.cat((backward[:-1], table))
        if (drops := chunk.drops(self.table_dropout, "distances_ahead")) is not None:
            table = drops.table(table)
        return self.heads_of(self.distance_key, table[:, None])[:, 0]

    def _newest(self, past: Tensor, own: Tensor) -> Tensor:
        """Return the newest M columns of [past; own], [M, B, ...] each; a copy: a view would keep all alive."""
        if own.shape[0] >= self.memory_length:
            return own[own.shape[0] - self.memory_length :].clone(memory_format=torch.contiguous_format)
        return torch.cat((past[own.shape[0] :], own))
