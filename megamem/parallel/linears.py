"""The linear layers a model is made of, behind one interface.

`Linears` says what a model may ask for; `PlainLinears` answers with torch's own layers in a single process (tests,
exported models), `megamem.parallel.megatron.MegatronLinears` with Megatron-Core's parallel ones. The model code is
the same for both and shows where it communicates: `enter` once before a group of column-parallel projections,
and the sum inside `row`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

T = TypeVar("T")
Initializer = Callable[[tuple[int, ...], torch.Generator], Tensor]


@dataclass(frozen=True)
class ParameterInfo:
    """What is declared beside a parameter: how it is split over tensor-parallel ranks, how it starts and learns."""

    shard_axis: int | None
    init: Initializer
    decay: bool
    fan_in: int | None = None
    """Axis of the inputs that each output sums over. None: there is no sum (vectors, tables, elementwise weights)."""
    lr_scale: float = 1.0
    """Its learning rate over the run's (see `megamem.model.mup`)."""


def normal(std: float) -> Initializer:
    """Start from a centered normal distribution."""
    return lambda shape, generator: torch.randn(shape, generator=generator) * std


def constant(value: float) -> Initializer:
    """Start from one value."""
    return lambda shape, generator: torch.full(shape, value)


def declare(
    parameter: nn.Parameter, init: Initializer, shard_axis: int | None = None, fan_in: int | None = None
) -> nn.Parameter:
    """Attach a `ParameterInfo`; matrices decay, vectors do not. Megatron's and DeepSpeed's marks are set with it."""
    parameter.info = ParameterInfo(shard_axis, init, parameter.ndim >= 2, fan_in)  # type: ignore[attr-defined]
    parameter.tensor_model_parallel = shard_axis is not None  # type: ignore[attr-defined]
    return parameter


def info(parameter: nn.Parameter) -> ParameterInfo:
    """Return the declaration of `parameter`. Raises AttributeError if a module forgot it."""
    return cast(ParameterInfo, parameter.info)  # type: ignore[attr-defined]


class SplitRows(nn.Module):
    """A table of vectors of which a rank holds a run of rows."""

    def __init__(self, count: int, width: int, init: Initializer, first: int = 0) -> None:
        """Make this rank's rows. count: their number; width: of each; first: the number of rows before them."""
        super().__init__()
        self.first = first
        self.weight = declare(nn.Parameter(torch.empty(count, width)), init, shard_axis=0)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows [..., width] of ids [...] int64; zeros for those that other ranks hold, or nobody."""
        own = ids - self.first
        missing = (own < 0) | (own >= self.weight.shape[0])
        found = F.embedding(own.masked_fill(missing, 0), self.weight)
        return found.masked_fill(missing[..., None], 0.0)


class Linears(Protocol):
    """Maker of (parallel) layers. Sizes are global; `tp_size` ranks share each layer, this one is `tp_rank`.

    Activations are [tokens, batch, features]. With `sequence_parallel`, tokens are split over the ranks outside of
    `enter` .. `row`.
    """

    tp_size: int
    tp_rank: int
    sequence_parallel: bool

    def column(self, inputs: int, outputs: int, init: Initializer, bias: bool = False) -> nn.Module:
        """Make a projection whose outputs are split over ranks. Its input must have passed `enter`."""

    def row(self, inputs: int, outputs: int, init: Initializer, bias: bool = False) -> nn.Module:
        """Make a projection whose inputs are split over ranks: it sums (or reduce-scatters), then adds the bias."""

    def embedding(self, vocabulary: int, width: int, init: Initializer) -> nn.Module:
        """Token embedding split over ranks by vocabulary: [tokens, batch] int64 -> [tokens, batch, width]."""

    def rows(self, count: int, width: int, init: Initializer) -> SplitRows:
        """Make a table of `count` rows that are split over ranks, whose look-ups are yet to be summed over them."""

    def enter(self, x: Tensor) -> Tensor:
        """Begin a parallel region with x [tokens, batch, width]: identity or all-gather; backward sums over ranks."""

    def leave(self, x: Tensor) -> Tensor:
        """End a parallel region as `row` does, with this rank's terms x [tokens, batch, width] of a sum over ranks."""

    def join_tokens(self, x: Tensor) -> Tensor:
        """All tokens of x [this rank's tokens, ...] on every rank; what is made of them is the same on each rank."""

    def split_tokens(self, x: Tensor) -> Tensor:
        """Return this rank's tokens of x [tokens, ...], the same on every rank; all where tokens are not split."""

    def shared(self, parameter: Tensor) -> Tensor:
        """Return a replicated parameter [...] that each rank uses for part of the work; its gradients are summed."""

    def outside(self, parameter: Tensor) -> Tensor:
        """Return a replicated parameter [...] used outside of parallel regions, by all tokens or by a rank's."""

    def whole(self, row: nn.Module, x: Tensor) -> Tensor:
        """Project rows x [rows, batch, width / ranks] that are no tokens of the call: the same on each rank."""

    def row_sum(self, rows: Sequence[tuple[nn.Module, Tensor]]) -> Tensor:
        """Return the sum of what `row` layers make of inputs [tokens, batch, width / ranks], summed over ranks once."""

    def fixed(self, column: nn.Module, x: Tensor) -> Tensor:
        """Project rows x [rows, batch, width] as `column` does, without a gradient for its parameters."""

    def with_weight(self, column: nn.Module, function: Callable[[Tensor, Tensor], T], x: Tensor) -> T:
        """Return function(x, weight) of x [tokens, batch, inputs] and this rank's weight [outputs / ranks, inputs].

        The weight is that of a layer made by `column`, without a bias. ZeRO 3, which keeps it in parts, has it whole
        while the function runs, and in its backward pass.
        """

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x [...], as of terms of a loss; each rank's gradient is that of its own x."""

    def cross_entropies(self, logits: Sequence[Tensor], labels: Sequence[Tensor]) -> list[Tensor]:
        """Return losses [n] in float32 of several vocabularies, with as few collectives as for one.

        logits: local ones [n, rows / tp_size] of each vocabulary, which may be overwritten; labels: [n] int64 of each.
        """

    def log_normalizer(self, logits: Tensor) -> Tensor:
        """Logarithm of the sum of the exponentials of all ranks' logits [..., rows / tp_size]: [...] in float32."""

    def largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest of all ranks' logits [..., rows / tp_size], and the first row that has it: [...] each."""


def token_share(linears: Linears) -> tuple[int, int]:
    """Return which part of a call's tokens is this rank's outside of parallel regions, and of how many."""
    return (linears.tp_rank, linears.tp_size) if linears.sequence_parallel else (0, 1)


class PlainLinears:
    """Everything on one device, with torch's own layers."""

    tp_size = 1
    tp_rank = 0
    sequence_parallel = False

    def column(self, inputs: int, outputs: int, init: Initializer, bias: bool = False) -> nn.Module:
        """See `Linears.column`."""
        layer = _empty_linear(inputs, outputs, bias)
        declare(layer.get_parameter("weight"), init, shard_axis=0, fan_in=1)
        if bias:
            declare(layer.get_parameter("bias"), constant(0.0), shard_axis=0)
        return layer

    def row(self, inputs: int, outputs: int, init: Initializer, bias: bool = False) -> nn.Module:
        """See `Linears.row`."""
        layer = _empty_linear(inputs, outputs, bias)
        declare(layer.get_parameter("weight"), init, shard_axis=1, fan_in=1)
        if bias:
            declare(layer.get_parameter("bias"), constant(0.0))
        return layer

    def embedding(self, vocabulary: int, width: int, init: Initializer) -> nn.Module:
        """See `Linears.embedding`."""
        layer = nn.Embedding(vocabulary, width, _weight=torch.empty(vocabulary, width))
        declare(cast(nn.Parameter, layer.weight), init, shard_axis=0)
        return layer

    def rows(self, count: int, width: int, init: Initializer) -> SplitRows:
        """See `Linears.rows`."""
        return SplitRows(count, width, init)

    def enter(self, x: Tensor) -> Tensor:
        """See `Linears.enter`."""
        return x

    def leave(self, x: Tensor) -> Tensor:
        """See `Linears.leave`."""
        return x

    def join_tokens(self, x: Tensor) -> Tensor:
        """See `Linears.join_tokens`."""
        return x

    def split_tokens(self, x: Tensor) -> Tensor:
        """See `Linears.split_tokens`."""
        return x

    def shared(self, parameter: Tensor) -> Tensor:
        """See `Linears.shared`."""
        return parameter

    def outside(self, parameter: Tensor) -> Tensor:
        """See `Linears.outside`."""
        return parameter

    def whole(self, row: nn.Module, x: Tensor) -> Tensor:
        """See `Linears.whole`."""
        return cast(Tensor, row(x))

    def row_sum(self, rows: Sequence[tuple[nn.Module, Tensor]]) -> Tensor:
        """See `Linears.row_sum`."""
        (layer, x), *others = rows
        total: Tensor = layer(x)
        for other, of_other in others:
            total = total + other(of_other)
        return total

    def fixed(self, column: nn.Module, x: Tensor) -> Tensor:
        """See `Linears.fixed`."""
        assert isinstance(column, nn.Linear)
        return F.linear(x, column.weight.detach(), None if column.bias is None else column.bias.detach())

    def with_weight(self, column: nn.Module, function: Callable[[Tensor, Tensor], T], x: Tensor) -> T:
        """See `Linears.with_weight`; the weight may lie on another device than x [tokens, batch, inputs]."""
        assert isinstance(column, nn.Linear)
        return function(x.to(column.weight.device), column.weight)

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """See `Linears.sum_over_ranks`."""
        return x

    def cross_entropies(self, logits: Sequence[Tensor], labels: Sequence[Tensor]) -> list[Tensor]:
        """See `Linears.cross_entropies`; float64 logits stay in float64."""
        full = [each if each.dtype == torch.float64 else each.float() for each in logits]
        return [F.cross_entropy(each, own, reduction="none") for each, own in zip(full, labels, strict=True)]

    def log_normalizer(self, logits: Tensor) -> Tensor:
        """See `Linears.log_normalizer`; float64 logits stay in float64."""
        return (logits if logits.dtype == torch.float64 else logits.float()).logsumexp(-1)

    def largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """See `Linears.largest`."""
        found = logits.max(-1)
        return found.values, found.indices


def _empty_linear(inputs: int, outputs: int, bias: bool) -> nn.Linear:
    """Return a linear layer on the default device whose parameters have no values yet."""
    layer = nn.Linear(inputs, outputs, bias=bias, device="meta")
    device = torch.empty(0).device
    # nothing to be done where plans count bytes: to_empty would import torch's compiler there
    return layer if device.type == "meta" else layer.to_empty(device=device)


def initialize_parameters(model: nn.Module, seed: int, tp_size: int = 1, tp_rank: int = 0) -> None:
    """Give every declared parameter its start value, the same whatever the layout.

    Each parameter is drawn whole on the CPU from a generator seeded by (seed, its global name), and this rank keeps
    its slice of the declared axis.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            declared = info(parameter)
            shape = list(parameter.shape)
            if declared.shard_axis is not None:
                shape[declared.shard_axis] *= tp_size
            digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
            with torch.device("cpu"):
                whole = declared.init(tuple(shape), generator)
            if declared.shard_axis is not None:
                whole = whole.chunk(tp_size, declared.shard_axis)[tp_rank]
            parameter.copy_(whole)
