"""What recurrent memories share: projections, short convolutions, gates, and the norm of what is read.

    q, k, v = SiLU(conv(W x)),   M_t = write(M_{t-1}, k_t, v_t),   y_t = M_t(q_t)
    out = W_o (RMSNorm(y) * SiLU(W_g x))

A mechanism says what its memory keeps (`memory_specs`), what becomes of queries and keys (`prepare`), which gates each
token has (`gates`), and how tokens write and read (`recur`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor, nn

from megamem.config.cost import Flops
from megamem.config.model import MIXERS, AnyMixer, MixerConfig, ModelConfig
from megamem.memory.base import Chunk, Losses, Mixer, State, StateSpec, TensorSpec, state_dtype
from megamem.ops.deep_memory.kept import Matrix, Rows
from megamem.parallel.linears import Linears, constant, declare, normal

Join = Callable[[int, Tensor, Tensor], Tensor]
"""(which matrix of the memory, what it is asked, what it answers) -> the answer with which reading goes on."""


class RecurrentConfig(MixerConfig):
    """Fields of every recurrent memory."""

    mergeable: ClassVar[bool] = False
    """Whether two segments' memories add up to that of both: what the later one kept of the earlier, and its own."""
    convolution: PositiveInt = 4
    """Tokens that the short convolutions of queries, keys and values span, the present one included; a SiLU follows.
    1: neither convolution nor SiLU."""
    output_gate: bool = True
    """Multiply what is read, normalized per head, by SiLU of a projection of the input."""

    def check(self, model: ModelConfig) -> None:
        """See `MixerConfig.check`."""
        if model.bias:
            raise ValueError(f"bias {model.bias} is not for {self.kind}: recurrent memories have no biases; use false")

    def values(self, model: ModelConfig) -> int:
        """Width of a head's values."""
        return model.resolved_head_dim

    def token_gates(self) -> int:
        """Projections of the input to one number per token and key/value head."""
        return 0

    @abstractmethod
    def memory_specs(self, model: ModelConfig) -> StateSpec:
        """What the memory itself keeps."""

    @abstractmethod
    def snapshot_shapes(self, model: ModelConfig) -> dict[str, tuple[int, int]]:
        """Of each head: what must be kept of the memory for it to go on answering when nothing is written any more."""

    @abstractmethod
    def memory_flops(self, model: ModelConfig, sequence_length: float, causal: bool, begun: int) -> dict[str, Flops]:
        """`mixing_flops` with a memory that begins anew after every `begun` tokens, the old one being kept.

        sequence_length: after it the memory is read by nobody and has no backward pass; infinite if it has one all the
        same.
        """

    def mixing_flops(self, model: ModelConfig, sequence_length: int, causal: bool) -> dict[str, Flops]:
        """See `MixerConfig.mixing_flops`."""
        return self.memory_flops(model, sequence_length, causal, sequence_length)

    def block(self) -> int:
        """Tokens between which the memory can be cut off: 1 where it is written token by token."""
        return 1

    def state_specs(self, model: ModelConfig) -> StateSpec:
        """The memory, and the projections of the last tokens for the short convolutions."""
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
        """Query, key, value, output and gates."""
        read = model.heads * self.values(model) * (2 if self.output_gate else 1)
        written = model.resolved_kv_heads * (model.resolved_head_dim + self.values(model) + self.token_gates())
        return model.hidden_size * (model.heads * model.resolved_head_dim + written + read)

    def extra_parameters(self, model: ModelConfig) -> int:
        """Convolutions, and the norm of what is read."""
        convolved = model.heads * model.resolved_head_dim + model.resolved_kv_heads * (
            model.resolved_head_dim + self.values(model)
        )
        taps = self.convolution if self.convolution > 1 else 0
        return taps * convolved + model.heads * self.values(model)


class SegmentedConfig(MixerConfig):
    """Fields of mixers that cut a text into segments and keep the memories of those that have ended."""

    unfit: ClassVar[str] = "is no memory that can be kept"
    """What is said of memories that this does not work for."""
    memory: AnyMixer
    """The recurrent memory."""
    segment: PositiveInt
    """Tokens of a segment."""

    @classmethod
    def fits(cls, memory: type[MixerConfig]) -> bool:
        """Whether this works for a kind of memory."""
        return issubclass(memory, RecurrentConfig)

    @property
    def recurrent(self) -> RecurrentConfig:
        """The memory's configuration. Raises ValueError for a mixer that this does not work for."""
        if not self.fits(type(self.memory)):
            valid = ", ".join(kind for kind, config in MIXERS.kinds().items() if self.fits(config))
            raise ValueError(f"memory {self.memory.kind} {self.unfit}; valid: {valid}")
        return cast(RecurrentConfig, self.memory)

    def check(self, model: ModelConfig) -> None:
        """See `MixerConfig.check`."""
        self.recurrent.check(model)
        if model.chunk_size % self.segment:
            raise ValueError(f"segment {self.segment} does not divide model.chunk_size {model.chunk_size}")
        if self.segment % self.recurrent.block():
            raise ValueError(f"segment {self.segment} is no multiple of memory.inner_chunk {self.recurrent.block()}")


@dataclass(frozen=True)
class Inputs:
    """What a memory is given of each token of a call, heads first.

    query: [batch, kv_heads, groups, tokens, width]; key, value: [batch, kv_heads, tokens, width]; gates, by name:
    [batch or 1, kv_heads, tokens], or [..., tokens, width].
    """

    query: Tensor
    key: Tensor
    value: Tensor
    gates: Mapping[str, Tensor]

    @property
    def tokens(self) -> int:
        """How many there are."""
        return self.key.shape[-2]

    def part(self, where: slice) -> Inputs:
        """Those of some tokens."""
        return Inputs(
            self.query[..., where, :],
            self.key[..., where, :],
            self.value[..., where, :],
            {name: gate[:, :, where] for name, gate in self.gates.items()},
        )

    def side_by_side(self, count: int) -> Inputs:
        """`count` stretches of equal length as rows of their own: [batch * count, ..., tokens / count, ...]."""
        rows = self.key.shape[0]

        def cut(x: Tensor, axis: int) -> Tensor:
            x = x.unflatten(axis, (count, -1)).movedim(axis, 1)
            return x.expand(rows, *x.shape[1:]).flatten(0, 1)

        gates = {name: cut(gate, 2) for name, gate in self.gates.items()}
        return Inputs(cut(self.query, 3), cut(self.key, 2), cut(self.value, 2), gates)


class ShortConvolution(nn.Module):
    """SiLU(sum_j w_j x_{t-j}) in each channel over the last `taps` tokens, zeros before a document's first."""

    def __init__(self, heads: int, width: int, taps: int, linears: Linears) -> None:
        super().__init__()
        channels = heads * width // linears.tp_size
        # each output starts with the variance of its inputs
        self.weight = declare(nn.Parameter(torch.empty(channels, taps)), normal(taps**-0.5), 0, fan_in=1)

    def forward(self, x: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """[tokens, batch, heads, width] and those of the taps - 1 tokens before; also the last taps - 1 of both."""
        tokens, taps = x.shape[0], self.weight.shape[1]
        weight = self.weight.unflatten(0, x.shape[-2:])
        joined = torch.cat((before, x))
        out = sum(weight[..., tap] * joined[tap : tap + tokens] for tap in range(taps))
        assert isinstance(out, Tensor)
        return F.silu(out), joined[tokens:].clone()


class HeadNorm(nn.Module):
    """RMSNorm over the width of each head, with a weight per channel."""

    def __init__(self, heads: int, width: int, eps: float, linears: Linears) -> None:
        super().__init__()
        self.eps = eps
        channels = heads * width // linears.tp_size
        self.weight = declare(nn.Parameter(torch.empty(channels)), constant(1.0), shard_axis=0)

    def forward(self, x: Tensor) -> Tensor:
        """[..., heads, width], in the dtype of x."""
        norm = F.rms_norm(x, x.shape[-1:], eps=self.eps)
        return norm * self.weight.unflatten(0, x.shape[-2:]).to(x.dtype)


class TokenGate(nn.Module):
    """One number per token and key/value head: a projection of the input, with a start value per head."""

    def __init__(self, model: ModelConfig, linears: Linears, start: float) -> None:
        super().__init__()
        self.weight = linears.column(model.hidden_size, model.resolved_kv_heads, normal(model.init_std))
        self.start = declare(
            nn.Parameter(torch.empty(model.resolved_kv_heads // linears.tp_size)), constant(start), shard_axis=0
        )

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, batch, hidden_size] -> [batch, local kv_heads, tokens], in float32 (float64 of float64)."""
        exact = state_dtype(x.dtype)
        return (self.weight(x).to(exact) + self.start.to(exact)).permute(1, 2, 0)


class RecurrentMixer(Mixer):
    """Projections, convolutions, norm and gates around a memory that every token writes and reads."""

    def __init__(self, config: RecurrentConfig, model: ModelConfig, linears: Linears) -> None:
        sizes = {
            "heads": model.heads,
            "kv_heads": model.resolved_kv_heads,
            "hidden": model.hidden_size,
            "chunk": model.chunk_size,
        }
        super().__init__(config.state_specs(model), sizes, linears.tp_size)
        self.linears = linears
        self.width = model.resolved_head_dim
        self.unit_keys = False
        """Whether keys have length 1, whatever the width of heads."""
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
        """Queries and keys [tokens, batch, heads, width] as the memory gets them."""
        return query * self.width**-0.5, key

    def gates(self, x: Tensor) -> dict[str, Tensor]:
        """What else the memory gets of each token, by name: [batch or 1, local kv_heads, tokens] or one per channel."""
        return {}

    @abstractmethod
    def recur(self, inputs: Inputs, memory: State, chunk: Chunk, join: Join | None = None) -> tuple[Tensor, State]:
        """What the tokens read [batch, kv_heads, groups, tokens, width], and the memory after them.

        join: lets other memories take part in what each matrix answers; the tokens lie in one `block` of each row then.
        """

    @abstractmethod
    def snapshot(self, memory: State) -> tuple[Tensor, ...]:
        """The tensors of `RecurrentConfig.snapshot_shapes` [batch, local kv_heads, ...], differentiable."""

    @abstractmethod
    def answer(self, query: Tensor, kept: Sequence[Tensor], shares: Tensor) -> Tensor:
        """sum_i shares_i M_i(q): query [batch, kv_heads, groups, tokens, width], kept [batch, kv_heads, memories, ...]
        of `snapshot`, shares [batch, kv_heads, groups, tokens, memories]."""

    @abstractmethod
    def answer_rows(self, x: Tensor, kept: Sequence[Matrix], rows: Rows) -> Tensor:
        """M(x) of each row's own memory: x [rows, width], kept the matrices of `snapshot` in lists of memories."""

    def renewed(self) -> list[str]:
        """State tensors that begin anew where a segment does; the convolutions' tokens before it stay."""
        return [
            name
            for name, spec in self.specs.items()
            if isinstance(spec, TensorSpec) and spec.kind == "memory" and not name.startswith("before_")
        ]

    @abstractmethod
    def product(self, matrix: int, x: Tensor, kept: Sequence[Tensor], shares: Tensor) -> Tensor:
        """sum_i shares_i x A_i, A_i the memories' matrix of that number; the others as in `answer`."""

    def inputs(self, x: Tensor, state: State, chunk: Chunk) -> tuple[Inputs, State]:
        """Of the tokens x [tokens, batch, hidden_size]; and what the next call's convolutions need of them."""
        made, after = {}, {}
        for name, width in self.widths.items():
            projected = getattr(self, name)(x).unflatten(-1, (-1, width))
            if name in self.convolutions:
                before = f"before_{name}"
                projected, after[before] = self.convolutions[name](projected, state[before])
            made[name] = projected
        query, key = self.prepare(made["query"], made["key"], chunk)
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, made["value"]))
        return Inputs(query.unflatten(1, (-1, self.groups)), key, value, self.gates(x)), after

    def finish(self, read: Tensor, x: Tensor, inputs: Inputs) -> Tensor:
        """The layer's output from what tokens x, with these inputs, read [batch, kv_heads, groups, tokens, width]."""
        read = self.norm(read.flatten(1, 2).permute(2, 0, 1, 3)).to(x.dtype).flatten(2)
        if self.gate is not None:
            read = read * F.silu(self.gate(x))
        out: Tensor = self.output(read)
        return out

    def forward(self, hidden: Tensor, state: State, chunk: Chunk) -> tuple[Tensor, State, Losses]:
        """See `Mixer.forward`."""
        x = self.linears.enter(hidden)
        inputs, after = self.inputs(x, state, chunk)
        state = {**state, **after}
        read, memory = self.recur(inputs, state, chunk)
        return self.finish(read, x, inputs), {**state, **memory}, {}
