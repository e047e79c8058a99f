"""Recurrent memories that are one matrix per head: every token adds an outer product.

    S_t = a_t S_{t-1} + k_t w_t^T,   y_t = S_t^T q_t

The base of linear attention, RetNet, DeltaNet and SSD, which differ in a_t and w_t. Tokens are read one by one by
definition: inner chunks change the order of sums alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import ClassVar

import torch
from pydantic import PositiveInt
from torch import Tensor

from megamem.config.cost import Flops
from megamem.config.model import ModelConfig
from megamem.memory.base import Chunk, State, StateSpec, TensorSpec, state_dtype
from megamem.memory.recurrent.base import Inputs, RecurrentConfig, RecurrentMixer
from megamem.ops.deep_memory.kept import Matrix, Rows, shared_product
from megamem.ops.deep_memory.kept_networks import Spans
from megamem.ops.deep_memory.network import Join
from megamem.ops.linear_recurrence.fla import Recurrence, fla_where_it_runs
from megamem.ops.linear_recurrence.torch import linear_recurrence
from megamem.ops.linear_recurrence.unrolled import Unrolled, unrolled
from megamem.parallel.linears import Linears


class MatrixConfig(RecurrentConfig):
    """Fields of every matrix memory."""

    mergeable: ClassVar[bool] = True
    expand_v: PositiveInt = 1
    """Width of a head's values over that of its keys."""
    inner_chunk: PositiveInt = 64
    """Tokens computed in one set of matrix products. The result does not depend on it."""

    def values(self, model: ModelConfig) -> int:
        """See `RecurrentConfig.values`."""
        return self.expand_v * model.resolved_head_dim

    def columns(self, model: ModelConfig) -> int:
        """Return the number of columns of S: the width of a head's values."""
        return self.values(model)

    def memory_specs(self, model: ModelConfig) -> StateSpec:
        """See `RecurrentConfig.memory_specs`: S."""
        shape = ("batch", "kv_heads", model.resolved_head_dim, self.columns(model))
        return {"memory": TensorSpec(shape, "float32", shard="kv_heads")}

    def snapshot_shapes(self, model: ModelConfig) -> dict[str, tuple[int, int]]:
        """See `RecurrentConfig.snapshot_shapes`: S."""
        return {"memory": (model.resolved_head_dim, self.columns(model))}

    def answers_add_up(self) -> bool:
        """See `RecurrentConfig.answers_add_up`."""
        return True

    def memory_flops(self, model: ModelConfig, sequence_length: float, causal: bool, begun: int) -> dict[str, Flops]:
        """See `matrix_flops`."""
        return matrix_flops(self, model, sequence_length, causal, begun)


def matrix_flops(
    config: MatrixConfig, model: ModelConfig, sequence_length: float, causal: bool, begun: int, delta: bool = False
) -> dict[str, Flops]:
    """Return the FLOPs per token of a matrix memory, see `RecurrentConfig.memory_flops`.

    `memory_attention` is what lies within inner chunks; `memory_retrieval` and `memory_update` are those of the matrix
    between them. The matrix that a memory begins with is zero and has no gradient, nor has what the last inner chunk
    writes.

    causal: a token counts itself and those before it in its inner chunk, the triangular solve of the delta rule alike.
    """
    inner = min(config.inner_chunk, model.chunk_size, begun)
    seen = (inner + 1) / 2 if causal else inner
    # shares of the inner chunks: those with one before them, those whose matrix is read afterwards
    older, newer = 1 - inner / begun, 1 - inner / sequence_length
    keys, values = model.resolved_head_dim, config.columns(model)
    within = 2 * model.heads * seen * (keys + values)
    read, write = 2 * model.heads * keys * values, 2 * model.resolved_kv_heads * keys * values
    parts = {
        "memory_attention": Flops(within, 2 * within),
        "memory_retrieval": Flops(read, read * (1 + older)),
        "memory_update": Flops(write, write * 2 * newer),
    }
    if delta:
        overlap, solve = 2 * model.resolved_kv_heads * seen * keys, model.resolved_kv_heads * seen * values
        parts["memory_attention"] += Flops(overlap + solve, 2 * overlap + 3 * solve)
        parts["memory_update"] += Flops(write, write * (1 + older))
    return parts


class MatrixMixer(RecurrentMixer):
    """A matrix per head, written by `linear_recurrence` with the gates `log_decay` and `rate` of tokens, or without."""

    def __init__(self, config: MatrixConfig, model: ModelConfig, linears: Linears) -> None:
        super().__init__(config, model, linears)
        self.inner_chunk, self.columns = config.inner_chunk, config.columns(model)
        self.kv_heads = model.resolved_kv_heads // linears.tp_size
        self.recurrence: Recurrence = partial(linear_recurrence, inner=self.inner_chunk)
        if model.recurrence_kernel == "fla":
            self.use_library()

    def use_library(self) -> None:
        """Let flash-linear-attention compute the recurrence from now on, where tokens are BF16 on CUDA."""
        self.recurrence = partial(fla_where_it_runs, otherwise=self.recurrence)

    @property
    def gated(self) -> tuple[bool, bool]:
        """Whether tokens have a decay, and whether they have a rate of the delta rule. Subclasses say so."""
        raise NotImplementedError

    def recur(self, inputs: Inputs, memory: State, chunk: Chunk, join: Join | None = None) -> tuple[Tensor, State]:
        """See `RecurrentMixer.recur`."""
        given = (inputs.query, inputs.key, self.written(inputs), memory["memory"])
        gates = (inputs.gates.get("log_decay"), inputs.gates.get("rate"), chunk.borders or ())
        read, after = self.recurrence(*given, *gates)
        return (read if join is None else join(0, inputs.query, read)), {"memory": after}

    def written(self, inputs: Inputs) -> Tensor:
        """Return v [B, H, T, V] as the recurrence takes it."""
        return inputs.value

    def unrolled(self, inputs: Inputs) -> Unrolled:
        """Return what the tokens, few enough for one set of products, read and write of their values and of S."""
        gates = (inputs.gates.get("log_decay"), inputs.gates.get("rate"))
        return unrolled(inputs.query, inputs.key, *gates, state_dtype(inputs.key.dtype))

    def snapshot(self, memory: State, parameters: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """See `RecurrentMixer.snapshot`."""
        return (memory["memory"],)

    def answer(self, inputs: Inputs, kept: Sequence[Tensor], shares: Tensor, spans: Spans = ()) -> Tensor:
        """See `RecurrentMixer.answer` ([B, H, G, T, V])."""
        query, matrices = inputs.query.to(kept[0].dtype), kept[0]
        if not spans:
            return self.answer_all(query, matrices, shares)
        # between two borders all tokens read the same memories
        borders, parts = sorted({0, query.shape[-2], *(border for span in spans for border in span)}), []
        for begin, end in pairwise(borders):
            read = [n for n, (first, last) in enumerate(spans) if first <= begin and end <= last]
            part = query[..., begin:end, :]
            if read:
                own = torch.stack([matrices[:, :, n] for n in read], dim=2)
                parts.append(self.answer_all(part, own, torch.stack([shares[..., begin:end, n] for n in read], dim=-1)))
            else:
                parts.append(part.new_zeros(*part.shape[:-1], self.widths["value"]))
        return torch.cat(parts, dim=-2)

    def answer_all(self, query: Tensor, matrices: Tensor, shares: Tensor) -> Tensor:
        """Return `answer` of tokens that all read all of the kept memories, [B, H, G, T, V].

        query: [B, H, G, T, D]; matrices: [B, H, N, D, V]; shares: [B, H, G, T, N].
        """
        return shared_product(query, matrices, shares)

    def mixed(self, inputs: Inputs, kept: Sequence[Tensor], shares: Tensor) -> Tensor:
        """See `RecurrentMixer.mixed`: the same as `answer`."""
        return self.answer(inputs, kept, shares)

    def answer_rows(self, x: Tensor, kept: Sequence[Matrix], rows: Rows) -> Tensor:
        """See `RecurrentMixer.answer_rows`."""
        return rows.times(x.to(kept[0][0].dtype), kept[0])

    def product(self, matrix: int, x: Tensor, kept: Sequence[Tensor], shares: Tensor) -> Tensor:
        """See `RecurrentMixer.product`."""
        return shared_product(x.to(kept[0].dtype), kept[0], shares)
