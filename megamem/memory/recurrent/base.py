"""What recurrent memories share: projections, short convolutions, gates, and the norm of what is read.

    q, k, v = SiLU(conv(W x)),   M_t = write(M_{t-1}, k_t, v_t),   y_t = M_t(q_t)
    out = W_o (RMSNorm(y) * SiLU(W_g x))

A mechanism declares what its memory keeps (`memory_specs`), and defines what becomes of queries and keys (`prepare`),
which gates each token has (`gates`), and how tokens write and read (`recur`). The composite mixers keep memories at the
ends of segments (`snapshot`), read many of them at once (`answer`, `mixed`, `answer_rows`, `product`), and let later
tokens act on them (`transition`).

Letters of shapes: B batch rows, H local key/value heads, G query heads that share one of them, T tokens, D head_dim, V
width of a head's values, N kept memories.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from megamem.config.cost import Flops
from megamem.config.model import MixerConfig, ModelConfig
from megamem.memory.base import Chunk, Losses, Mixer, State, StateSpec, TensorSpec, state_dtype
from megamem.memory.recurrent.head_norm import HeadNorm
from megamem.memory.recurrent.short_convolution import ShortConvolution
from megamem.ops.deep_memory.kept import Copies, Matrix, Rows, selected_answer
from megamem.ops.deep_memory.kept_networks import Spans
from megamem.ops.deep_memory.network import Join
from megamem.ops.unit import unit
from megamem.parallel.linears import Linears, constant, declare, normal


class RecurrentConfig(MixerConfig):
    """Fields of every recurrent memory."""

    mergeable: ClassVar[bool] = False
    """Whether the memory of two segments is the later one's plus what its tokens leave of the earlier one's, which is
    linear in it: a transition (`RecurrentMixer.transition`)."""
    convolution: PositiveInt = 4
    """Tokens that the short convolutions of queries, keys and values span, the present one included; a SiLU follows.
    1: neither convolution nor SiLU."""
    output_gate: bool = True
    """Multiply what is read, normalized per head, by SiLU of a projection of the input."""

    def check(self, model: ModelConfig) -> None:
        """See `MixerConfig.check`."""
        if model.all_biases:
            raise ValueError(
                f"bias {str(model.bias).lower()} is not for {self.kind}: recurrent memories have no biases; use false"
            )

    def rotates(self) -> bool:
        """See `MixerConfig.rotates`: what is written in order needs no positions."""
        return False

    def projection_biases(self, model: ModelConfig) -> int:
        """See `MixerConfig.projection_biases`: none, also where attention has some."""
        return 0

    def values(self, model: ModelConfig) -> int:
        """Return the width of a head's values."""
        return model.resolved_head_dim

    def token_gates(self) -> int:
        """Count the projections of the input to one number per token and key/value head."""
        return 0

    @abstractmethod
    def memory_specs(self, model: ModelConfig) -> StateSpec:
        """Declare what the memory itself keeps."""

    @abstractmethod
    def snapshot_shapes(self, model: ModelConfig) -> dict[str, tuple[int, int]]:
        """Name the matrices of each head that a kept memory is read with, and their shapes.

        They are what must be kept for a memory to go on answering when nothing is written any more.
        """

    @abstractmethod
    def memory_flops(self, model: ModelConfig, sequence_length: float, causal: bool, begun: int) -> dict[str, Flops]:
        """Return `mixing_flops` of a memory that begins anew after every `begun` tokens, the old one being kept.

        sequence_length: after so many tokens the memory is read by nobody and has no backward pass; infinite if it has
            one all the same.
        """

    def mixing_flops(self, model: ModelConfig, sequence_length: int, causal: bool) -> dict[str, Flops]:
        """See `MixerConfig.mixing_flops`."""
        return self.memory_flops(model, sequence_length, causal, sequence_length)

    def block(self) -> int:
        """Return the tokens after which a memory can be kept: 1 where it is written token by token."""
        return 1

    def answers_add_up(self) -> bool:
        """Return whether a weighted sum of memories answers with the weighted sum of their answers."""
        return False

    def transition_size(self, model: ModelConfig) -> int:
        """Return the rows R of `RecurrentMixer.transition`: 1 where memories fade by a number, 0 where they do not."""
        return 0

    def state_specs(self, model: ModelConfig) -> StateSpec:
        """Declare the memory, and the projections of the last tokens for the short convolutions."""
        return {**self.memory_specs(model), **self._convolution_specs(model)}

    def _convolution_specs(self, model: ModelConfig) -> StateSpec:
        taps = self.convolution - 1
        widths = {"query": ("heads", model.resolved_head_dim), "key": ("kv_heads", model.resolved_head_dim)}
        widths["value"] = ("kv_heads", self.values(model))
        return {
            f"before_{name}": TensorSpec((taps, "batch", heads, width), shard=heads)
            for name, (heads, width) in widths.items()
            if taps
        }

    def projection_parameters(self, model: ModelConfig) -> int:
        """Count the projections to query, key, value, output and gates."""
        read = model.heads * self.values(model) * (2 if self.output_gate else 1)
        written = model.resolved_kv_heads * (model.resolved_head_dim + self.values(model) + self.token_gates())
        return model.hidden_size * (model.heads * model.resolved_head_dim + written + read)

    def extra_parameters(self, model: ModelConfig) -> int:
        """Count the convolutions and the norm of what is read."""
        convolved = model.heads * model.resolved_head_dim + model.resolved_kv_heads * (
            model.resolved_head_dim + self.values(model)
        )
        taps = self.convolution if self.convolution > 1 else 0
        return taps * convolved + model.heads * self.values(model)


@dataclass(frozen=True)
class Inputs:
    """What a memory is given of each token of a call, heads first."""

    query: Tensor
    """[B, H, G, T, D]"""
    key: Tensor
    """[B, H, T, D]"""
    value: Tensor
    """[B, H, T, V]"""
    gates: Mapping[str, Tensor]
    """The mechanism's gates by name: [B or 1, H, T], or [B or 1, H, T, D] where each channel has its own."""
    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    """What the memory itself has learned, by name. Read once a call, however many memories take part: under ZeRO 3 all
    ranks have to call the same modules, and which memories there are depends on their documents."""

    @property
    def tokens(self) -> int:
        """Number of tokens T."""
        return self.key.shape[-2]

    def part(self, where: slice) -> Inputs:
        """Return the inputs of some of the tokens."""
        return Inputs(
            self.query[..., where, :],
            self.key[..., where, :],
            self.value[..., where, :],
            {name: gate[:, :, where] for name, gate in self.gates.items()},
            self.parameters,
        )

    def rows(self, where: slice) -> Inputs:
        """Return the inputs of some of the batch rows."""
        gates = {name: gate if gate.shape[0] == 1 else gate[where] for name, gate in self.gates.items()}
        return Inputs(self.query[where], self.key[where], self.value[where], gates, self.parameters)

    def side_by_side(self, count: int) -> Inputs:
        """Cut the tokens into `count` stretches of equal length, as batch rows of their own: [B * count, ...]."""
        rows = self.key.shape[0]

        def cut(x: Tensor, axis: int) -> Tensor:
            """Cut the token axis of x [B or 1, ..., T, ...]; gates that all rows share are repeated."""
            x = x.unflatten(axis, (count, -1)).movedim(axis, 1)
            return x.expand(rows, *x.shape[1:]).flatten(0, 1)

        gates = {name: cut(gate, 2) for name, gate in self.gates.items()}
        return Inputs(cut(self.query, 3), cut(self.key, 2), cut(self.value, 2), gates, self.parameters)

    def steps(self, count: int) -> Inputs:
        """Cut the tokens into `count` steps of equal length, as heads of their own: [B, H * count, ...]."""

        def cut(x: Tensor, axis: int) -> Tensor:
            """Cut the token axis of x [B or 1, H, ..., T, ...]."""
            return x.unflatten(axis, (count, -1)).movedim(axis, 2).flatten(1, 2)

        gates = {name: cut(gate, 2) for name, gate in self.gates.items()}
        return Inputs(cut(self.query, 3), cut(self.key, 2), cut(self.value, 2), gates, self.parameters)


class TokenGate(nn.Module):
    """A gate per token and key/value head: a projection of the token, plus a learned start value per head."""

    def __init__(self, model: ModelConfig, linears: Linears, start: float) -> None:
        super().__init__()
        self.weight = linears.column(model.hidden_size, model.resolved_kv_heads, normal(model.init_std))
        self.start = declare(
            nn.Parameter(torch.empty(model.resolved_kv_heads // linears.tp_size)), constant(start), shard_axis=0
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map x [T, B, hidden_size] to [B, H, T], in float32 (float64 for float64)."""
        exact = state_dtype(x.dtype)
        return (self.weight(x).to(exact) + self.start.to(exact)).permute(1, 2, 0)


class RecurrentMixer(Mixer):
    """Projections, convolutions, norm and gates around a memory that every token writes and reads."""

    reads_borders = True

    def __init__(self, config: RecurrentConfig, model: ModelConfig, linears: Linears) -> None:
        super().__init__(config.state_specs(model), model.state_sizes, linears.tp_size)
        self.linears = linears
        self.width = model.resolved_head_dim
        self.unit = unit
        """Makes vectors [..., width] one long."""
        self.unit_keys = False
        """Whether keys have length 1, whatever the width of heads. Subclasses set it."""
        self.query_scale: float = self.width**-0.5
        """What queries are multiplied by for this memory. Subclasses set it."""
        self.groups = model.heads // model.resolved_kv_heads
        init = normal(model.init_std)
        back = normal(model.init_std / (2 * model.layers) ** 0.5)
        wide, values = model.hidden_size, config.values(model)
        shapes = {
            "query": (model.heads, model.resolved_head_dim),
            "key": (model.resolved_kv_heads, model.resolved_head_dim),
            "value": (model.resolved_kv_heads, values),
        }
        self.widths = {name: width for name, (_, width) in shapes.items()}
        for name, (heads, width) in shapes.items():
            setattr(self, name, linears.column(wide, heads * width, init))
        self.convolutions = nn.ModuleDict(
            {name: ShortConvolution(*shape, config.convolution, linears) for name, shape in shapes.items()}
            if config.convolution > 1
            else {}
        )
        self.norm = HeadNorm(model.heads, values, model.norm_eps, linears)
        self.gate = linears.column(wide, model.heads * values, init) if config.output_gate else None
        self.output = linears.row(model.heads * values, wide, back)

    def prepare(self, query: Tensor, key: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Return queries and keys [T, B, local heads or kv_heads, D] as the memory gets them."""
        return query * self.query_scale, key

    def gates(self, x: Tensor) -> dict[str, Tensor]:
        """Return what else the memory gets of tokens x [T, B, hidden_size], see `Inputs.gates`."""
        return {}

    def memory_parameters(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return `Inputs.parameters` in `dtype`."""
        return {}

    @abstractmethod
    def recur(self, inputs: Inputs, memory: State, chunk: Chunk, join: Join | None = None) -> tuple[Tensor, State]:
        """Write each token into the memory, then read the memory with its query.

        Args:
            inputs: of the tokens.
            memory: the state before them.
            chunk: where they lie in their documents.
            join: lets other memories take part in what each matrix answers; the tokens of a memory that is written in
                blocks must lie in one `block` of each row then.
        Returns: what the tokens read, [B, H, G, T, V]; the state tensors that changed.
        """

    def recur_from_start(self, inputs: Inputs, chunk: Chunk) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return what tokens read of memories that begin with them, [B, H, G, T, V], and `snapshot` at the end."""
        fresh = self.initial_state(inputs.key.shape[0], inputs.key.device, inputs.key.dtype)
        read, memory = self.recur(inputs, fresh, chunk)
        return read, self.snapshot(memory, inputs.parameters)

    @abstractmethod
    def snapshot(self, memory: State, parameters: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the matrices of `RecurrentConfig.snapshot_shapes` [B, H, ...], differentiable.

        parameters: see `Inputs`.
        """

    def transition(self, inputs: Inputs) -> Tensor | None:
        """Return what the tokens leave of all that was written before them, less the whole: [B or 1, H, R, R].

        `passed` makes of it what is left of a memory. Here it is a number, the product of the tokens' decays less 1;
        None where there are no decays.
        """
        log_decay = inputs.gates.get("log_decay")
        return None if log_decay is None else torch.expm1(log_decay.sum(2))[..., None, None]

    @abstractmethod
    def answer(self, inputs: Inputs, kept: Sequence[Tensor], shares: Tensor, spans: Spans = ()) -> Tensor:
        """Return sum_n shares_n M_n(q), the weighted answers of kept memories.

        Args:
            inputs: of the tokens that ask.
            kept: the matrices of `snapshot`, of N memories each, [B, H, N, ...].
            shares: [B, H, G, T, N].
            spans: the first token that reads each memory, and the first one after it that does not; outside, shares
                are 0. If not given, all tokens may read all of them.
        Returns: [B, H, G, T, V].
        """

    @abstractmethod
    def mixed(self, inputs: Inputs, kept: Sequence[Tensor], shares: Tensor) -> Tensor:
        """Return what one memory answers whose matrices are sum_n shares_n A_n: [B, H, G, T, V].

        kept as in `answer`; shares: [B, H, G or 1, T, N].
        """

    @abstractmethod
    def answer_rows(self, x: Tensor, kept: Sequence[Matrix], rows: Rows) -> Tensor:
        """Return what each row's own memory makes of it, [rows, V]: what `answered` makes M(x) of.

        x: [rows, D]; kept: the matrices of `snapshot`, each as lists of memories; rows: which memory a row reads.
        """

    def answer_selected(
        self, inputs: Inputs, kept: Sequence[Sequence[Tensor]], shares: Sequence[Tensor], most: int,
        copies: Copies | None = None, far: Sequence[bool] = (),
    ) -> Tensor:  # fmt: skip
        """Return sum_n shares_n M_n(q) of kept memories, computing no answer whose share is 0: [B, H, G, T, V].

        Args:
            inputs: of the tokens that ask.
            kept: for each list of memories, the matrices of `snapshot`, [B, H, N, ...].
            shares: for each list, [B, H, G, T, N].
            most: how many of a query's shares are not 0 at most.
            copies: those made so far, if memories may lie elsewhere than the queries.
            far: for each list, whether its memories do.
        """
        width = inputs.value.shape[-1]
        made = selected_answer(self.answer_rows, inputs.query, kept, shares, width, copies, far)
        return self.answered(made, inputs, torch.cat(list(shares), dim=-1).sum(-1, keepdim=True))

    def answered(self, made: Tensor, inputs: Inputs, total: Tensor) -> Tensor:
        """Return sum_n shares_n M_n(q), given the same sum of what `answer_rows` returns for each memory.

        made: [B, H, G, T, V]; inputs: of the tokens that ask; total: the sum of each one's shares, [B, H, G, T, 1].
        """
        return made

    def renewed(self) -> list[str]:
        """Name the state tensors that begin anew where a segment does; the convolutions go on across its border."""
        return [
            name
            for name, spec in self.specs.items()
            if isinstance(spec, TensorSpec) and spec.kind == "memory" and not name.startswith("before_")
        ]

    @abstractmethod
    def product(self, matrix: int, x: Tensor, kept: Sequence[Tensor], shares: Tensor) -> Tensor:
        """Return sum_n shares_n x A_n [B, H, G, T, out], with A_n the matrix of that number of memory n.

        x: [B, H, G, T, in]; kept and shares as in `answer`.
        """

    def inputs(self, x: Tensor, state: State, chunk: Chunk) -> tuple[Inputs, State]:
        """Return the memory's inputs of tokens x [T, B, hidden_size], and what the next call's convolutions need."""
        made, after = {}, {}
        for name, width in self.widths.items():
            projected = getattr(self, name)(x).unflatten(-1, (-1, width))
            if name in self.convolutions:
                before = f"before_{name}"
                projected, after[before] = self.convolutions[name](projected, state[before], chunk)
            made[name] = projected
        query, key = self.prepare(made["query"], made["key"], chunk)
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, made["value"]))
        parameters = self.memory_parameters(state_dtype(x.dtype))
        return Inputs(query.unflatten(1, (-1, self.groups)), key, value, self.gates(x), parameters), after

    def finish(self, read: Tensor, x: Tensor, inputs: Inputs) -> Tensor:
        """Return the layer's output from what its tokens have read of the memory.

        read: [B, H, G, T, V]; x: the tokens [T, B, hidden_size]; inputs: those of the memory. Returns: like x.
        """
        gate = None if self.gate is None else self.gate(x)
        out: Tensor = self.output(self.norm(read.flatten(1, 2), gate, x.dtype))
        return out

    def forward(self, hidden: Tensor, state: State, chunk: Chunk) -> tuple[Tensor, State, Losses]:
        """See `Mixer.forward`."""
        x = self.linears.enter(hidden)
        inputs, after = self.inputs(x, state, chunk)
        read, memory = self.recur(inputs, state, chunk)
        return self.finish(read, x, inputs), {**state, **memory, **after}, {}
