"""Memory Caching: a recurrent memory whose states at the ends of segments are kept and read beside it.

Behrouz et al., "Memory Caching: RNNs with Growing Memory". With M_t the memory of the open segment, M^(i) what it was
at the end of segment i, and g their shares (gamma in the paper):

    residual   y_t = M_t(q_t) + sum_i M^(i)(q_t)                              Residual Memory (equation 7)
    grm        y_t = g_t M_t(q_t) + sum_i g_t^(i) M^(i)(q_t)                  Gated Residual Memory (8)
    soup       y_t = M*(q_t), each matrix of M*: g_t W_t + sum_i g_t^(i) W^(i)    Memory Soup (13)
    ssc        as grm, over the open segment and the `top_k` kept ones        Sparse Selective Caching (15)
               of highest score
    g^(i) = softmax over segments of <u_t, pool_i>                            (9, 14)

u_t is a projection of the token, and pool_i the mean of a segment's keys, that of the open one up to the token.
Segments begin with the document.

The state is that of the recurrent memory, and

    key_sum    sum of the open segment's keys, from which its pool is made
    log_kept   sum of the logarithms of its decays, where merging needs it

and with segments of constant length (`constant_segments.py`)

    closed_*   memories and pools of the segments of the open chunk that have ended, column by column
    kept       a list with one entry per finished chunk: the closed_* columns of that chunk, never copied again

or with segments of logarithmic length (`logarithmic_segments.py`)

    level_n_*  memory and sum of keys of the last 2^n segments but those of lower levels, if there are such

Letters of shapes: B batch rows, H local key/value heads, G query heads that share one of them, T tokens, N kept
segments, D head_dim, V width of a head's values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from megamem.config.model import MIXERS, ModelConfig
from megamem.memory.base import Chunk, Losses, Mixer, State, to_device
from megamem.memory.composite.constant_segments import ConstantSegments
from megamem.memory.composite.logarithmic_segments import LogarithmicSegments
from megamem.memory.composite.memory_caching_settings import MemoryCachingSettings
from megamem.memory.composite.segments import Ended, Gating, KeptSegments, Segments, SegmentSlice, gate_shares, pool
from megamem.memory.recurrent.base import Inputs, RecurrentMixer
from megamem.ops.deep_memory.kept import Copies
from megamem.parallel.linears import Linears, normal


@MIXERS.register
class MemoryCachingConfig(MemoryCachingSettings):
    """Memory Caching: keep a recurrent memory's states at the ends of segments, and read them all, or some."""

    kind: Literal["memory_caching"] = "memory_caching"
    """`memory_caching`"""

    def build(self, model: ModelConfig, linears: Linears, layer: int) -> MemoryCaching:
        """See `MixerConfig.build`."""
        return MemoryCaching(self, model, linears, layer)


class MemoryCaching(Mixer):
    """A recurrent memory, and what it was at the end of each segment."""

    reads_borders = True

    def __init__(self, config: MemoryCachingConfig, model: ModelConfig, linears: Linears, layer: int) -> None:
        memory = config.recurrent.build(model, linears, layer)
        assert isinstance(memory, RecurrentMixer)
        super().__init__(config.state_specs(model), memory.sizes, linears.tp_size)
        self.config = config
        self.gating = Gating(config.combine, config.gate, config.top_k, config.scores)
        self.linears = linears
        self.memory = memory
        self.kept: KeptSegments = ConstantSegments(config, model)
        if config.lengths == "logarithmic":
            self.kept = LogarithmicSegments(config, model, memory)
        self.step = config.step()
        by_keys, unit = config.scores == "context", memory.unit_keys
        # one factor for scores of keys that are not unit vectors, one for queries that are none
        scale = model.score_scale ** ((config.routed or not unit) + (not unit)) if by_keys else 1.0
        # where the memory's queries route, u is q as it was before the memory divided it
        self.score_scale = scale / config.temperature / (1.0 if config.routed else memory.query_scale)
        if config.combine == "residual":
            self.score_scale = 1.0  # there are no scores
        self.router = None
        if config.routed:
            width = config.router_width(model)
            self.router = linears.column(model.hidden_size, model.heads * width, normal(model.init_std))

    def forward(self, hidden: Tensor, state: State, chunk: Chunk) -> tuple[Tensor, State, Losses]:
        """See `Mixer.forward`."""
        x = self.linears.enter(hidden)
        inputs, after = self.memory.inputs(x, state, chunk)
        # u [B, H, G, T, D], or scores by age [B, H, G, T, ages]
        router_query = inputs.query
        if self.router is not None:
            heads = self.memory.groups * inputs.key.shape[1]
            projected = self.router(x).unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)
            router_query = projected.unflatten(1, (-1, self.memory.groups))
        if self.score_scale != 1.0:
            router_query = router_query * self.score_scale
        reads, done = [], 0
        copies = Copies() if self.config.kept_on == "host" else None
        while done < inputs.tokens:
            here = chunk.after(done)
            state = self.reset_inside(state, done, here.starts, inputs.key)
            left = here.document_splits(inputs.tokens - done)[0].stop
            count = self._whole_segments(here, left, state)
            if count:
                part = slice(done, done + count * self.config.segment)
                asked = inputs.part(part), router_query[..., part, :]
                read, state = self._read_segments(*asked, state, here, count, copies)
            else:  # up to the next border of any row
                tokens = min(left, *(self.step - start % self.step for start in here.starts))
                part = slice(done, done + tokens)
                block_slice = self._slice(here, tokens)
                read, state = self._read(inputs.part(part), router_query[..., part, :], state, block_slice, copies)
            reads.append(read)
            done = part.stop
        read = torch.cat(reads, dim=-2) if len(reads) > 1 else reads[0]
        return self.memory.finish(read, x, inputs), {**state, **after}, {}

    def _slice(self, chunk: Chunk, tokens: int) -> SegmentSlice:
        """Describe the first `tokens` tokens of `chunk`, which lie within one segment of each row."""
        size = self.config.segment
        # rows whose documents begin anywhere may have been on other grids before
        grids = {start % size for start in chunk.starts} if chunk.borders is None else chunk.starts
        return SegmentSlice(0, tokens, chunk.starts, size, len(grids))

    def _whole_segments(self, chunk: Chunk, tokens: int, state: State) -> int:
        """Return how many whole segments of the open chunk can be written at the same time; 0 if not several."""
        size = self.config.segment
        if not self.config.side_by_side() or any(start < 0 or start % size for start in chunk.starts):
            return 0
        count = self.kept.room(state, tokens // size)
        return count if count > 1 else 0

    def _read_segments(
        self,
        inputs: Inputs,
        router_query: Tensor,
        state: State,
        chunk: Chunk,
        count: int,
        copies: Copies | None,
    ) -> tuple[Tensor, State]:
        """Write `count` whole segments of each row at the same time, then read them.

        router_query: u [B, H, G, T, D]; copies: see `_answers`.
        Returns: what the tokens read, [B, H, G, T, V]; the new state.
        """
        size, rows = self.config.segment, chunk.rows
        # each segment is a batch row of its own with a fresh memory: [B * count, ...]
        starts = tuple(start + size * i for start in chunk.starts for i in range(count))
        segments = inputs.side_by_side(count)
        answered, matrices = self.memory.recur_from_start(segments, Chunk(starts))
        key_sums = segments.key.to(state["key_sum"].dtype).cumsum(2)
        log_kept = segments.gates["log_decay"].sum(2) if self.config.fades else None

        def apart(x: Tensor) -> Tensor:
            """Give the segments of a row an axis of their own, [B * count, ...] -> [B, count, ...]."""
            return x.unflatten(0, (rows, count))

        ended = Ended(
            # copied once: whoever reads them would copy them each time
            tuple(apart(x).movedim(1, 2).contiguous() for x in matrices),
            apart(key_sums[:, :, -1]).movedim(1, 2),
            None if log_kept is None else apart(log_kept).movedim(1, 2),
        )
        slices = [self._slice(chunk.after(i * size), size) for i in range(count)]
        # segment i reads its own memory, those of the segments before it, and the ones kept earlier
        readable, state = self.kept.one_by_one(state, ended, slices, inputs.parameters)
        # the tokens of all segments behind one another again
        answered = apart(answered).movedim(1, -3).flatten(-3, -2)
        pools = (
            apart(pool(key_sums, [[1 + t for t in range(size)]], self.config.pooling)).movedim(1, -3).flatten(-3, -2)
        )
        reads, together = [], inputs.tokens // len(readable)
        for i, kept in enumerate(readable):
            part = slice(i * together, (i + 1) * together)
            asked = router_query[..., part, :].to(pools.dtype)
            own, shares = gate_shares(asked, pools[..., part, :], kept, self.gating)
            answers = self._answers(inputs.part(part), kept, shares, copies)
            reads.append(torch.addcmul(answers, own, answered[..., part, :]))
        return (torch.cat(reads, dim=-2) if len(reads) > 1 else reads[0]), state

    def _read(
        self, inputs: Inputs, router_query: Tensor, state: State, block_slice: SegmentSlice, copies: Copies | None
    ) -> tuple[Tensor, State]:
        """Write and read tokens that lie within one segment of each row; the segment is kept if it ends with them.

        router_query: u [B, H, G, T, D]; copies: see `_answers`.
        Returns: what the tokens read, [B, H, G, T, V]; the new state.
        """
        kept = self.kept.readable(state, block_slice)
        # the open segment's pool at each token: the mean of its keys so far
        key_sums = state["key_sum"][:, :, None] + inputs.key.to(state["key_sum"].dtype).cumsum(2)
        counts = [[offset + 1 + t for t in range(inputs.tokens)] for offset in block_slice.offsets]
        pools = pool(key_sums, counts, self.config.pooling)
        own, shares = gate_shares(router_query.to(pools.dtype), pools, kept, self.gating)
        chunk = Chunk(block_slice.starts)
        if self.config.mixes():

            def join(matrix: int, x: Tensor, answered: Tensor) -> Tensor:
                """Mix what the open memory's matrix answers, [B, H, G, T, out], with what the kept ones' do."""
                return own * answered + sum(
                    self.memory.product(matrix, x, part.weights, share)
                    for part, share in zip(kept, shares, strict=True)
                )

            read, memory = self.memory.recur(inputs, state, chunk, join)
        else:
            read, memory = self.memory.recur(inputs, state, chunk)
            read = own * read + self._answers(inputs, kept, shares, copies)
        state = {**state, **memory, "key_sum": key_sums[:, :, -1]}
        if self.config.fades:
            state["log_kept"] = state["log_kept"] + inputs.gates["log_decay"].sum(2)
        return read, self._close(state, inputs.parameters, block_slice) if any(block_slice.closing) else state

    def _answers(self, inputs: Inputs, kept: list[Segments], shares: list[Tensor], copies: Copies | None) -> Tensor:
        """Return the sum of the kept memories' answers times their shares, [B, H, G, T, V].

        inputs: of the tokens that ask; shares: [B, H, G, T, N] of each list; copies: made in this call of memories that
            lie elsewhere. With `ssc` only what the router chose is computed.
        """
        if not kept:
            return inputs.query.new_zeros(())
        if self.config.combine == "ssc":
            weights, far = [part.weights for part in kept], [part.far for part in kept]
            return self.memory.answer_selected(inputs, weights, shares, self.config.top_k, copies, far)
        answers = [
            self.memory.answer(inputs, part.weights, share, part.spans)
            for part, share in zip(kept, shares, strict=True)
        ]
        return sum(answers[1:], answers[0])

    def _close(self, state: State, parameters: Mapping[str, Tensor], block_slice: SegmentSlice) -> State:
        """Keep the memory [B, H, ...] of rows whose segment ends, begin their next one. parameters: see `Inputs`."""
        ended = Ended(self.memory.snapshot(state, parameters), state["key_sum"], state.get("log_kept"))
        state = self.kept.close(state, ended, block_slice, parameters)
        closing = to_device(block_slice.closing, state["key_sum"].device, torch.bool)
        renewed = ["key_sum", *(["log_kept"] if self.config.fades else [])]
        if self.config.write == "independent":
            renewed += self.memory.renewed()
        for name in renewed:
            fresh = torch.zeros_like(state[name])
            rows = closing.view(-1, *[1] * (fresh.ndim - 1))
            state[name] = fresh if all(block_slice.closing) else torch.where(rows, fresh, state[name])
        return state
