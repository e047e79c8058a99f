"""`Linears` made of Megatron-Core's tensor-parallel layers, with explicit groups.

Collectives per block and pass, as in Megatron: `enter` all-reduces in the backward (once for all projections behind
it), `row` all-reduces in the forward; with sequence parallelism they become all-gather and reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megamem.parallel.libraries import quiet
from megamem.parallel.linears import Initializer, SplitRows, constant, declare
from megamem.parallel.losses import cross_entropies
from megamem.parallel.sequence import gather_tokens, join_tokens, reduce_scatter_tokens, split_tokens

with quiet():
    from megatron.core import ModelParallelConfig
    from megatron.core.tensor_parallel import (
        ColumnParallelLinear,
        RowParallelLinear,
        VocabParallelEmbedding,
    )
    from megatron.core.tensor_parallel.mappings import (
        copy_to_tensor_model_parallel_region,
        reduce_from_tensor_model_parallel_region,
    )

T = TypeVar("T")


def _unused(weight: Tensor) -> None:
    """Do nothing to a weight [...]: Megatron wants an initializer, `initialize_parameters` sets every weight."""


class _Column(ColumnParallelLinear):
    def forward(self, x: Tensor, fixed: bool = False, function: Callable[[Tensor, Tensor], Any] | None = None) -> Any:
        """[tokens, batch, inputs] -> [tokens, batch, outputs / ranks].

        fixed: parameters get no gradient. function: what is returned instead, of x and the weight.
        """
        if function is not None:
            return function(x, self.weight)
        if fixed:
            return F.linear(x, self.weight.detach(), None if self.bias is None else self.bias.detach())
        out: Tensor = super().forward(x)[0]
        return out


class _Row(RowParallelLinear):
    linears: MegatronLinears

    def forward(self, x: Tensor, whole: bool = False, partial: bool = False, plus: Tensor | None = None) -> Tensor:
        """[tokens, batch, inputs / ranks] -> [tokens, batch, outputs].

        whole: tokens are never split. partial: this rank's part of the sum. plus: other layers' parts, summed along.
        """
        if partial:
            return F.linear(x, self.weight)
        if plus is not None:
            total = F.linear(x, self.weight) + plus
            if self.linears.sequence_parallel:
                total = reduce_scatter_tokens(total, self.tp_group)
            else:
                total = reduce_from_tensor_model_parallel_region(total, group=self.tp_group)
            return total if self.bias is None else total + self.linears.outside(self.bias)
        if self.linears.sequence_parallel and not whole:
            own = reduce_scatter_tokens(F.linear(x, self.weight), self.tp_group)
            return own if self.bias is None else own + self.linears.outside(self.bias)
        out: Tensor = super().forward(x)[0]
        return out


class _Embedding(VocabParallelEmbedding):
    linears: MegatronLinears

    def forward(self, tokens: Tensor) -> Tensor:
        """[tokens, batch] int64 -> this rank's [tokens, batch, width]."""
        out: Tensor = super().forward(tokens)
        return split_tokens(out, self.tp_group) if self.linears.sequence_parallel else out


class MegatronLinears:
    """See `megamem.parallel.linears.Linears`; layers are split over the ranks of `group`."""

    def __init__(self, group: ProcessGroup, sequence_parallel: bool = False) -> None:
        self.group = group
        self.tp_size = group.size()
        self.tp_rank = group.rank()
        self.sequence_parallel = sequence_parallel and self.tp_size > 1
        # "CPU initialization" only means that weights are made on the default device, and not filled
        self._config: Any = ModelParallelConfig(
            tensor_model_parallel_size=self.tp_size,
            use_cpu_initialization=True,
            perform_initialization=False,
            params_dtype=torch.float32,
        )

    def column(self, inputs: int, outputs: int, init: Initializer, bias: bool = False) -> nn.Module:
        """See `Linears.column`."""
        layer = _Column(
            inputs,
            outputs,
            config=self._config,
            init_method=_unused,
            bias=bias,
            disable_grad_reduce=True,
            tp_group=self.group,
        )
        declare(layer.weight, init, shard_axis=0, fan_in=1)
        if bias:
            declare(layer.bias, constant(0.0), shard_axis=0)
        return layer

    def row(self, inputs: int, outputs: int, init: Initializer, bias: bool = False) -> nn.Module:
        """See `Linears.row`."""
        layer = _Row(
            inputs,
            outputs,
            config=self._config,
            init_method=_unused,
            bias=bias,
            input_is_parallel=True,
            skip_bias_add=False,
            tp_group=self.group,
        )
        layer.linears = self
        declare(layer.weight, init, shard_axis=1, fan_in=1)
        if bias:
            declare(layer.bias, constant(0.0))
        return layer

    def embedding(self, vocabulary: int, width: int, init: Initializer) -> nn.Module:
        """See `Linears.embedding`."""
        layer = _Embedding(
            vocabulary,
            width,
            init_method=_unused,
            config=self._config,
            tp_group=self.group,
        )
        layer.linears = self
        declare(layer.weight, init, shard_axis=0)
        return layer

    def rows(self, count: int, width: int, init: Initializer) -> SplitRows:
        """See `Linears.rows`."""
        own = count // self.tp_size
        return SplitRows(own, width, init, self.tp_rank * own)

    def enter(self, x: Tensor) -> Tensor:
        """See `Linears.enter`."""
        if self.sequence_parallel:
            return gather_tokens(x, self.group)
        return self.shared(x)

    def leave(self, x: Tensor) -> Tensor:
        """See `Linears.leave`; x: [tokens, batch, width]."""
        return reduce_scatter_tokens(x, self.group) if self.sequence_parallel else self.sum_over_ranks(x)

    def join_tokens(self, x: Tensor) -> Tensor:
        """See `Linears.join_tokens`; x: [tokens / ranks, ...] with sequence parallelism."""
        return join_tokens(x, self.group) if self.sequence_parallel else x

    def split_tokens(self, x: Tensor) -> Tensor:
        """See `Linears.split_tokens`; x: [tokens, ...]."""
        return split_tokens(x, self.group) if self.sequence_parallel else x

    def shared(self, parameter: Tensor) -> Tensor:
        """See `Linears.shared`."""
        out: Tensor = copy_to_tensor_model_parallel_region(parameter, group=self.group)
        if out.requires_grad and self.tp_size > 1:
            # Megatron-Core sums into a copy of a gradient that is not contiguous, and hands on the original
            out.register_hook(lambda gradient: gradient.contiguous())
        return out

    def outside(self, parameter: Tensor) -> Tensor:
        """See `Linears.outside`."""
        return self.shared(parameter) if self.sequence_parallel else parameter

    def whole(self, row: nn.Module, x: Tensor) -> Tensor:
        """See `Linears.whole`."""
        out: Tensor = row(x, whole=True)
        return out

    def row_sum(self, rows: Sequence[tuple[nn.Module, Tensor]]) -> Tensor:
        """See `Linears.row_sum`; inputs: [tokens, batch, width / ranks]. Biases of all but the first are left out."""
        (layer, x), *others = rows
        parts = [other(of_other, partial=True) for other, of_other in others]
        out: Tensor = layer(x, plus=sum(parts[1:], parts[0])) if parts else layer(x)
        return out

    def fixed(self, column: nn.Module, x: Tensor) -> Tensor:
        """See `Linears.fixed`; x: [rows, batch, width]."""
        out: Tensor = column(x, fixed=True)
        return out

    def with_weight(self, column: nn.Module, function: Callable[[Tensor, Tensor], T], x: Tensor) -> T:
        """See `Linears.with_weight`; x: [tokens, batch, inputs]."""
        out: T = column(x, function=function)
        return out

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """See `Linears.sum_over_ranks`; x: [...]."""
        # Megatron-Core sums into a copy of what is not contiguous, and returns the original
        out: Tensor = reduce_from_tensor_model_parallel_region(x.contiguous(), group=self.group)
        return out

    def cross_entropies(self, logits: Sequence[Tensor], labels: Sequence[Tensor]) -> list[Tensor]:
        """See `Linears.cross_entropies`; logits: [n, rows / tp_size] each, labels: [n] each."""
        return cross_entropies(logits, labels, self.group)

    def log_normalizer(self, logits: Tensor) -> Tensor:
        """See `Linears.log_normalizer`; float64 logits stay in float64."""
        logits = _at_least_float32(logits)
        largest = logits.detach().amax(-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        # each rank goes on with the same sum: the gradient of a rank's own terms is that of the sum
        terms = (logits - largest[..., None]).exp().sum(-1)
        total: Tensor = reduce_from_tensor_model_parallel_region(terms, group=self.group)
        return largest + total.log()

    def largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """See `Linears.largest`; logits: [..., rows / tp_size]."""
        found = logits.max(-1)
        own = _at_least_float32(found.values)
        over_ranks = own.clone()
        dist.all_reduce(over_ranks, op=dist.ReduceOp.MAX, group=self.group)
        # ties go to the first of the vocabulary, as in one process
        size = logits.shape[-1]
        first = torch.where(own == over_ranks, found.indices + self.tp_rank * size, self.tp_size * size)
        dist.all_reduce(first, op=dist.ReduceOp.MIN, group=self.group)
        return over_ranks, first


def _at_least_float32(x: Tensor) -> Tensor:
    """Return x [...] in float32, or in float64 where it is."""
    return x if x.dtype == torch.float64 else x.float()
