"""Memora: a network per head whose weights are distributions over their inputs, learned by descent in the logarithms.

Behrouz et al., "It's All Connected" (Miras), 2025: l = |M(k) - v|^2 with retention by the Kullback-Leibler divergence,
W_t = c softmax(a_t log W_{t-1} - b_t grad l) for each row of each matrix; rate b and decay a of each token and channel,
through a low rank. `megamem/ops/deep_memory/simplex.py` says what is approximated within an inner chunk. The state is
what has been added to the logarithms that every document starts from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar, Literal

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn

from megamem.config.cost import Flops, product
from megamem.config.model import MIXERS, ModelConfig
from megamem.memory.base import State, state_dtype, to_device
from megamem.memory.recurrent.base import Inputs
from megamem.memory.recurrent.deep import DeepMemory, InnerChunk
from megamem.memory.recurrent.deep_config import DeepConfig
from megamem.ops.deep_memory.error import Loss
from megamem.ops.deep_memory.kernels import read_group_of
from megamem.ops.deep_memory.network import Join, Weights
from megamem.ops.deep_memory.simplex import (
    GROUP,
    ChannelRates,
    ReadGroup,
    SimplexNetwork,
    on_simplex,
    simplex_memory,
    simplex_memory_chunks,
)
from megamem.parallel.linears import Linears, constant, declare, normal


@MIXERS.register
class MemoraConfig(DeepConfig):
    """Memora (Miras): a small network per head with rows on the simplex, whose logarithms learn values from keys."""

    kind: Literal["memora"] = "memora"
    """`memora`"""
    loss: ClassVar[Loss] = "l2"
    first_decay: ClassVar[float] = 9.2
    """Logarithms fade by a ten-thousandth per token: rows that are nearly even answer all keys alike, and a layer norm
    enlarges what is left."""
    decay: bool = True
    """Flatten the distributions at a rate of each token and channel."""
    gate_rank: PositiveInt = 8
    """Numbers per head through which a token's rates, or decays, of all channels of the head pass."""
    scale: PositiveFloat | None = None
    """Sum of a row's weights; the root of their number if not given, as in a row of normal weights."""

    def check(self, model: ModelConfig) -> None:
        """See `MixerConfig.check`."""
        if self.start == "zero":
            raise ValueError("start zero is not for memora, whose rows would be alike for ever; use learned")
        super().check(model)

    def gate_shape(self, model: ModelConfig) -> tuple[int, ...]:
        """See `DeepConfig.gate_shape`: one number per channel."""
        return (model.resolved_head_dim,)

    def token_gates(self) -> int:
        """See `RecurrentConfig.token_gates`: the numbers of the low ranks."""
        return self.gate_rank * len(self.gate_starts())

    def extra_parameters(self, model: ModelConfig) -> int:
        """Count what other deep memories have, and from the low rank to each channel, with a start value."""
        gates, per_gate = (
            len(self.gate_starts()),
            model.resolved_kv_heads * (self.gate_rank + 1) * model.resolved_head_dim,
        )
        return super().extra_parameters(model) - model.resolved_kv_heads * self.token_gates() + gates * per_gate

    def memory_flops(self, model: ModelConfig, sequence_length: float, causal: bool, begun: int) -> dict[str, Flops]:
        """See `deep_flops`.

        Added are the low ranks, the second write of each inner chunk's first token and, where decays differ within a
        row, three products that keep the rows' sums.
        """
        parts = super().memory_flops(model, sequence_length, causal, begun)
        sizes = [rows * columns for rows, columns in self.matrices(model).values()]
        inner = min(self.inner_chunk, begun)
        parts["memory_update"] += product(2 * model.resolved_kv_heads * sum(sizes) / inner)
        if self.decay and len(sizes) == 2:
            shifts = 3 * 2 * model.resolved_kv_heads * sizes[0]
            # the last update is read by nobody
            parts["memory_update"] += Flops(shifts, 2 * shifts * (1 - inner / sequence_length))
        ranks = 2 * model.resolved_kv_heads * self.gate_rank * model.resolved_head_dim * len(self.gate_starts())
        return {**parts, "memory_gates": product(ranks)}

    def build(self, model: ModelConfig, linears: Linears, layer: int) -> Memora:
        """See `MixerConfig.build`."""
        return Memora(self, model, linears)


class ChannelGate(nn.Module):
    """A gate per token and channel: a projection of the token through a few numbers per head, with start values."""

    def __init__(self, model: ModelConfig, linears: Linears, rank: int, start: float) -> None:
        super().__init__()
        local = model.resolved_kv_heads // linears.tp_size
        self.weight = linears.column(model.hidden_size, model.resolved_kv_heads * rank, normal(model.init_std))
        self.channels = declare(
            nn.Parameter(torch.empty(local, rank, model.resolved_head_dim)), normal(rank**-0.5), shard_axis=0, fan_in=1
        )
        self.start = declare(nn.Parameter(torch.empty(local, model.resolved_head_dim)), constant(start), shard_axis=0)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [T, B, hidden_size] to [B, local kv_heads, T, head_dim], in float32 (float64 for float64)."""
        exact = state_dtype(x.dtype)
        low = self.weight(x).to(exact).unflatten(-1, (self.channels.shape[0], -1)).permute(1, 2, 0, 3)
        return low @ self.channels.to(exact) + self.start[:, None].to(exact)


class Memora(DeepMemory):
    """A network of distributions per head that is trained on the keys and values it reads."""

    config: MemoraConfig

    def __init__(self, config: MemoraConfig, model: ModelConfig, linears: Linears) -> None:
        super().__init__(config, model, linears)
        self.read_group: Callable[[Tensor, int], ReadGroup | None] = partial(read_group_of, self.kernel, self.precision)

    def make_gate(self, model: ModelConfig, linears: Linears, start: float) -> nn.Module:
        """See `DeepMemory.make_gate`."""
        assert isinstance(self.config, MemoraConfig)
        return ChannelGate(model, linears, self.config.gate_rank, start)

    def read_whole(self, inputs: Inputs, memory: State) -> tuple[Tensor, State]:
        """See `DeepMemory.read_whole`."""
        query, key, value, gates = self.in_inner_chunks(inputs)
        logs = self.learned(memory, inputs.parameters)
        rates = ChannelRates(gates["rate"], gates.get("log_decay"))
        read, after = simplex_memory_chunks(
            query, key, value, logs, rates, self.network(inputs.parameters),
            self.group or GROUP, self.read_group(query, len(logs)),
        )  # fmt: skip
        return read.flatten(3, 4), {**memory, **self.added(memory, logs, after)}

    def network(self, parameters: Mapping[str, Tensor]) -> SimplexNetwork:
        """Return the settings of the network; `parameters` has the norm's weight [H, D]."""
        return SimplexNetwork(self.config.scale, self.config.residual, self.output_norm(parameters), self.pointwise)

    def weights(self, memory: State, parameters: Mapping[str, Tensor]) -> Weights:
        """See `DeepMemory.weights`."""
        return on_simplex(self.learned(memory, parameters), self.config.scale)

    def learn(self, inner: InnerChunk, memory: State, join: Join | None) -> tuple[Tensor, State]:
        """See `DeepMemory.learn`; what is learned are the logarithms of the weights."""
        rate, decay = inner.tokens["rate"], inner.tokens.get("log_decay")
        seen = inner.seen()
        if seen is not None:
            rate = rate * seen[..., None]
            decay = None if decay is None else decay * seen[..., None]
        # open tokens before a row's own inner chunk are not its first
        first = to_device([inner.open_tokens - offset for offset in inner.new.offsets], rate.device)
        logs = self.learned(memory, inner.parameters)
        read, after = simplex_memory(
            inner.query, inner.tokens["key"], inner.tokens["value"], logs, ChannelRates(rate, decay, first),
            self.network(inner.parameters), join,
        )  # fmt: skip
        return read, self.added(memory, logs, after)
