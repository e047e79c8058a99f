"""Memory Caching (paper 004): a recurrent memory whose states at the ends of segments are kept and read beside it.

    residual   y_t = M_t(q_t) + sum_i M^(i)(q_t)                                           (equation 7)
    grm        y_t = g_t M_t(q_t) + sum_i g_t^(i) M^(i)(q_t)                               (8)
    soup       y_t = M*(q_t), each matrix of M* being g_t W_t + sum_i g_t^(i) W^(i)        (13)
    ssc        as grm, over the open segment and the `top_k` kept ones of highest score  (15)
    g^(i) = softmax over segments of u_t . pool_i, pool the mean of a segment's keys; of the open one, of those so far

Segments begin with the document. Kept memories stand in a growing list, one entry per chunk, and are never copied.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from pydantic import PositiveInt
from torch import Tensor

from megamem.config.cost import Flops, product
from megamem.config.model import MIXERS, AnyMixer, ModelConfig
from megamem.memory.base import Chunk, Growing, Losses, Mixer, State, StateSpec, TensorSpec, to_device
from megamem.memory.composite.segments import Gating, Segments, gate_shares
from megamem.memory.recurrent.base import Inputs, RecurrentMixer, SegmentedConfig
from megamem.memory.recurrent.matrix import MatrixConfig
from megamem.memory.shared.blocks import BlockSlice
from megamem.ops.deep_memory.kept import selected_answer
from megamem.parallel.linears import Linears, normal


@MIXERS.register
class MemoryCachingConfig(SegmentedConfig):
    """Memory Caching: keep a recurrent memory's states at the ends of segments, and read them all, or some."""

    kind: Literal["memory_caching"] = "memory_caching"
    """`memory_caching`"""
    memory: AnyMixer
    """The recurrent memory: linear_attention, retnet, delta_net, ssd, dla, titans or memora, with its own fields."""
    combine: Literal["residual", "grm", "soup", "ssc"] = "grm"
    """How kept memories take part: their answers are summed; summed with gates; their weights are mixed before a query
    reads them; or only the answers of the `top_k` most fitting are summed with gates."""
    segment: PositiveInt = 256
    """Tokens after which the memory's state is kept. Divides model.chunk_size."""
    gate: Literal["softmax", "sigmoid", "raw"] = "softmax"
    """What becomes of the scores: a softmax over kept segments and the open one, sigmoids, or nothing."""
    pooling: Literal["mean", "sum"] = "mean"
    """How a segment's keys become the vector that scores are made with."""
    router: Literal["own", "query"] = "own"
    """The other vector: a projection of the token, or its query."""
    write: Literal["independent", "continued"] = "independent"
    """Whether each segment starts from a fresh memory, or from the one that the segment before it ended with."""
    top_k: PositiveInt = 2
    """Kept memories that a token reads with `ssc`."""
    max_chunks: PositiveInt | None = None
    """Past chunks whose memories are kept, the oldest dropped first; all if not given. Bound it in streams mode."""

    def kept_specs(self, model: ModelConfig, memories: int | str, kind: Any = "memory") -> dict[str, TensorSpec]:
        """The end of `memories` segments: their weights, pooled keys, and whether the row's segment ended there."""
        shapes = {**self.recurrent.snapshot_shapes(model), "pool": (model.resolved_head_dim,)}
        specs = {
            name: TensorSpec(("batch", "kv_heads", memories, *shape), "float32", shard="kv_heads", kind=kind)
            for name, shape in shapes.items()
        }
        return {**specs, "filled": TensorSpec(("batch", memories), "int64", kind=kind)}

    def state_specs(self, model: ModelConfig) -> StateSpec:
        """The open memory and the sum of its segment's keys, the kept ones by chunk, and those of the open chunk."""
        kept = Growing(self.kept_specs(model, model.chunk_size // self.segment), self.max_chunks)
        open_tokens = self.kept_specs(model, "open", "open")
        return {
            **self.recurrent.state_specs(model),
            "key_sum": TensorSpec(("batch", "kv_heads", model.resolved_head_dim), "float32", shard="kv_heads"),
            "kept": kept,
            **{f"closed_{name}": spec for name, spec in open_tokens.items()},
        }

    def reach(self, start: int, chunk_size: int) -> int:
        """How many segments before its open one a row at position `start` may read."""
        if start <= 0:
            return 0
        if self.max_chunks is None:
            return start // self.segment
        return min(start, start % chunk_size + self.max_chunks * chunk_size) // self.segment

    @property
    def routed(self) -> bool:
        """Whether scores are made with a projection of their own."""
        return self.combine != "residual" and self.router == "own"

    def projection_parameters(self, model: ModelConfig) -> int:
        """The memory's, and the router's."""
        router = model.hidden_size * model.heads * model.resolved_head_dim if self.routed else 0
        return self.recurrent.projection_parameters(model) + router

    def extra_parameters(self, model: ModelConfig) -> int:
        """The memory's."""
        return self.recurrent.extra_parameters(model)

    def mixing_flops(self, model: ModelConfig, sequence_length: int, causal: bool) -> dict[str, Flops]:
        """The memory's; `memory_routing`, the scores, and `memory_caching`, what the kept ones answer.

        Each token reads all segments before its own, within reach; with `ssc` `top_k` of them at most.
        """
        begun = min(self.segment, sequence_length) if self.write == "independent" else sequence_length
        several = self.side_by_side() and self.segment < min(model.chunk_size, sequence_length)
        # the end of a sequence's last segment, which nobody reads, is computed with those of the segments beside it
        length = math.inf if several else sequence_length
        parts = self.recurrent.memory_flops(model, length, causal, begun)
        within, read = self.kept_and_read(model, sequence_length)
        sizes = sum(rows * columns for rows, columns in self.recurrent.snapshot_shapes(model).values())
        if self.combine != "residual":
            parts["memory_routing"] = product(2 * model.heads * model.resolved_head_dim * within)
        parts["memory_caching"] = product(2 * model.heads * sizes * read)
        return parts

    def side_by_side(self) -> bool:
        """Whether the segments of a call are written at the same time: where none knows of another's memory, and none
        is read while it is written, as mixtures of networks are."""
        return self.write == "independent" and not self.mixes()

    def mixes(self) -> bool:
        """Whether networks are mixed. Of single matrices, a mixture answers with the mixture of their answers."""
        return self.combine == "soup" and not isinstance(self.recurrent, MatrixConfig)

    def kept_and_read(self, model: ModelConfig, sequence_length: int) -> tuple[float, float]:
        """Kept memories within a token's reach, and those of them it reads; means over a sequence."""
        segments = range(-(-sequence_length // self.segment))
        within = [self.reach(segment * self.segment, model.chunk_size) for segment in segments]
        read = [min(count, self.top_k) for count in within] if self.combine == "ssc" else within
        return sum(within) / len(segments), sum(read) / len(segments)

    def summary(self, model: ModelConfig, sequence_length: int) -> str | None:
        """The share of the kept memories that is read."""
        within, read = self.kept_and_read(model, sequence_length)
        share = f", {read / within:.0%}" if within else ""
        return f"memory caching ({self.combine}): a token reads {read:.2f} of {within:.2f} kept memories{share}"

    def build(self, model: ModelConfig, linears: Linears, layer: int) -> MemoryCaching:
        """See `MixerConfig.build`."""
        return MemoryCaching(self, model, linears, layer)


class MemoryCaching(Mixer):
    """A recurrent memory, and what it was at the end of each segment."""

    def __init__(self, config: MemoryCachingConfig, model: ModelConfig, linears: Linears, layer: int) -> None:
        memory = config.recurrent.build(model, linears, layer)
        assert isinstance(memory, RecurrentMixer)
        super().__init__(config.state_specs(model), memory.sizes, linears.tp_size)
        self.config = config
        self.gating = Gating(config.combine, config.gate, config.top_k)
        self.linears = linears
        self.memory = memory
        self.names = [*config.recurrent.snapshot_shapes(model), "pool", "filled"]
        self.per_chunk = model.chunk_size // config.segment
        # mixed networks are read matrix by matrix, and so within one block of the memory
        self.step = config.recurrent.block() if config.mixes() else config.segment
        # for scores of keys that are not unit vectors, and of queries that are not scaled by their width
        self.score_scale = model.score_scale ** (config.routed + (not memory.unit_keys))
        self.router = None
        if config.routed:
            self.router = linears.column(
                model.hidden_size, model.heads * model.resolved_head_dim, normal(model.init_std)
            )

    def forward(self, hidden: Tensor, state: State, chunk: Chunk) -> tuple[Tensor, State, Losses]:
        """See `Mixer.forward`."""
        x = self.linears.enter(hidden)
        inputs, after = self.memory.inputs(x, state, chunk)
        state = {**state, **after}
        asking = inputs.query
        if self.router is not None:
            own = self.router(x).unflatten(-1, (-1, self.memory.width)).permute(1, 2, 0, 3)
            asking = own.unflatten(1, (-1, self.memory.groups))
        if self.score_scale != 1.0:
            asking = asking * self.score_scale
        reads, done = [], 0
        while done < inputs.tokens:
            here = chunk.after(done)
            left = inputs.tokens - done
            count = self._side_by_side(here, left, state)
            if count:
                part = slice(done, done + count * self.config.segment)
                read, state = self._read_segments(inputs.part(part), asking[..., part, :], state, here, count)
            else:  # to the next border of any row
                tokens = min(left, *(self.step - start % self.step for start in here.starts))
                part = slice(done, done + tokens)
                block_slice = BlockSlice(0, tokens, here.starts, self.config.segment)
                read, state = self._read(inputs.part(part), asking[..., part, :], state, block_slice)
            reads.append(read)
            done = part.stop
        read = torch.cat(reads, dim=-2) if len(reads) > 1 else reads[0]
        return self.memory.finish(read, x, inputs), state, {}

    def _side_by_side(self, chunk: Chunk, tokens: int, state: State) -> int:
        """How many whole segments can be written at the same time from here on."""
        size = self.config.segment
        if not self.config.side_by_side() or any(start < 0 or start % size for start in chunk.starts):
            return 0
        count = min(tokens // size, self.per_chunk - state["closed_filled"].shape[1])
        return count if count > 1 else 0

    def _read_segments(
        self, inputs: Inputs, asking: Tensor, state: State, chunk: Chunk, count: int
    ) -> tuple[Tensor, State]:
        """`count` whole segments of each row."""
        size, rows = self.config.segment, chunk.rows
        starts = tuple(start + size * i for start in chunk.starts for i in range(count))
        fresh = self.memory.initial_state(rows * count, inputs.key.device, inputs.key.dtype)
        parts = inputs.side_by_side(count)
        answered, memory = self.memory.recur(parts, fresh, Chunk(starts))
        key_sums = parts.key.to(state["key_sum"].dtype).cumsum(2)
        pools = self._pool(key_sums, [[1 + t for t in range(size)]])
        ends = [*self.memory.snapshot(memory), pools[:, :, -1]]
        # [batch * count, heads, ...] -> [batch, heads, count, ...]
        new = [x.unflatten(0, (rows, count)).movedim(1, 2) for x in ends]
        filled = state["closed_filled"].new_ones(rows, count)
        answered, pools = (x.unflatten(0, (rows, count)) for x in (answered, pools))
        reads = []
        for i in range(count):
            part = slice(i * size, (i + 1) * size)
            before = {name: x[:, :, :i] for name, x in zip(self.names[:-1], new, strict=True)}
            here = BlockSlice(0, size, chunk.after(part.start).starts, size)
            kept = self._kept([{**before, "filled": filled[:, :i]}, *self._entries(state)], here)
            own, shares = gate_shares(asking[..., part, :].to(pools.dtype), pools[:, i], kept, self.gating)
            reads.append(own * answered[:, i] + self._answers(inputs.query[..., part, :], kept, shares))
        return torch.cat(reads, dim=-2), self._keep(state, new, filled, here)

    def _read(self, inputs: Inputs, asking: Tensor, state: State, block_slice: BlockSlice) -> tuple[Tensor, State]:
        """Tokens within one segment of each row."""
        kept = self._kept(self._entries(state), block_slice)
        key_sums = state["key_sum"][:, :, None] + inputs.key.to(state["key_sum"].dtype).cumsum(2)
        pools = self._pool(key_sums, [[offset + 1 + t for t in range(inputs.tokens)] for offset in block_slice.offsets])
        own, shares = gate_shares(asking.to(pools.dtype), pools, kept, self.gating)
        chunk = Chunk(block_slice.starts)
        if self.config.mixes():

            def join(matrix: int, x: Tensor, answered: Tensor) -> Tensor:
                return own * answered + sum(
                    self.memory.product(matrix, x, part.weights, share)
                    for part, share in zip(kept, shares, strict=True)
                )

            read, memory = self.memory.recur(inputs, state, chunk, join)
        else:
            read, memory = self.memory.recur(inputs, state, chunk)
            read = own * read + self._answers(inputs.query, kept, shares)
        state = {**state, **memory, "key_sum": key_sums[:, :, -1]}
        return read, self._close(state, block_slice) if any(block_slice.closing) else state

    def _answers(self, query: Tensor, kept: list[Segments], shares: list[Tensor]) -> Tensor:
        """Of kept memories, weighted; with `ssc` only what the router chose is computed."""
        if not kept:
            return query.new_zeros(())
        query = query.to(shares[0].dtype)
        if self.config.combine == "ssc":
            return selected_answer(self.memory.answer_rows, query, [part.weights for part in kept], shares)
        answers = (self.memory.answer(query, part.weights, share) for part, share in zip(kept, shares, strict=True))
        return sum(answers, query.new_zeros(()))

    def _pool(self, key_sums: Tensor, counts: list[list[int]]) -> Tensor:
        """Means of keys from their sums [batch, heads, tokens, width] and counts per row and token; or the sums."""
        if self.config.pooling == "sum":
            return key_sums
        return key_sums / to_device(counts, key_sums.device, key_sums.dtype)[:, None, :, None]

    def _entries(self, state: State) -> list[dict[str, Tensor]]:
        """What is kept, the newest first."""
        return [{name: state[f"closed_{name}"] for name in self.names}, *reversed(state["kept"])]

    def _kept(self, entries: list[dict[str, Tensor]], block_slice: BlockSlice) -> list[Segments]:
        """Kept memories that some row may read, newest last, with those each row may; entries: the newest first."""
        reach = [self.config.reach(start, self.sizes["chunk"]) for start in block_slice.starts]
        columns = max(reach) * self._grids(block_slice)
        parts: list[Segments] = []
        newer = entries[0]["filled"].new_zeros(len(reach), 1)  # memories of each row that are newer than the part
        limit = to_device(reach, newer.device, newer.dtype)[:, None]
        for entry in entries:
            if columns <= 0:
                break
            filled = entry["filled"]
            if not filled.shape[1]:
                continue
            columns -= filled.shape[1]
            from_here = filled.flip(1).cumsum(1).flip(1) + newer
            visible = (filled > 0) & (from_here <= limit)
            newer = from_here[:, :1]
            weights = tuple(entry[name] for name in self.names[:-2])
            parts.append(Segments(weights, entry["pool"], visible))
        return parts[::-1]

    def _grids(self, block_slice: BlockSlice) -> int:
        """How many different grids of segments the rows have: so many columns may be written per segment."""
        return len({start % self.config.segment for start in block_slice.starts})

    def _close(self, state: State, block_slice: BlockSlice) -> State:
        """Keep the memory of rows whose segment ends, and begin their next one."""
        closing = to_device(block_slice.closing, state["key_sum"].device, torch.bool)
        pool = self._pool(state["key_sum"][:, :, None], [[self.config.segment]] * len(block_slice.closing))
        new = [*(x[:, :, None] for x in self.memory.snapshot(state)), pool]
        if not all(block_slice.closing):  # nothing is kept of other rows
            new = [torch.where(closing.view(-1, *[1] * (x.ndim - 1)), x, 0) for x in new]
        state = self._keep(state, new, closing.to(state["closed_filled"].dtype)[:, None], block_slice)
        renewed = {"key_sum": torch.zeros_like(state["key_sum"])}
        if self.config.write == "independent":
            renewed |= {name: torch.zeros_like(state[name]) for name in self.memory.renewed()}
        for name, fresh in renewed.items():
            rows = closing.view(-1, *[1] * (fresh.ndim - 1))
            state[name] = fresh if all(block_slice.closing) else torch.where(rows, fresh, state[name])
        return state

    def _keep(self, state: State, new: list[Tensor], filled: Tensor, block_slice: BlockSlice) -> State:
        """Append finished segments to the kept ones, and the entry to the list once the chunk is full.

        new: memories and pools [batch, heads, segments, ...] of segments that end with the slice; filled: whether each
            row has such a segment, [batch, segments] int64.
        """
        columns = {
            name: torch.cat((state[f"closed_{name}"], column), dim=_axis(name))
            for name, column in zip(self.names, (*new, filled), strict=True)
        }
        kept = list(state["kept"])
        if columns["filled"].shape[1] == self.per_chunk:
            kept.append(columns)
            columns = {name: tensor.narrow(_axis(name), 0, 0).clone() for name, tensor in columns.items()}
        return {
            **state,
            **{f"closed_{name}": tensor for name, tensor in columns.items()},
            "kept": self._bounded(kept, block_slice),
        }

    def _bounded(self, kept: list[dict[str, Tensor]], block_slice: BlockSlice) -> list[dict[str, Tensor]]:
        """The entries within some row's reach; rows on grids of their own each fill columns of theirs."""
        reach = max(self.config.reach(end, self.sizes["chunk"]) for end in block_slice.ends) * self._grids(block_slice)
        needed = -(-reach // self.per_chunk)
        return kept[max(len(kept) - needed, 0) :]


def _axis(name: str) -> int:
    return 1 if name == "filled" else 2
