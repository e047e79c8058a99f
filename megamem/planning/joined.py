"""Functions that a device runs as one kernel, though the CPU runs them as many operations.

torch has one kernel for the RMS norm on CUDA, flash-linear-attention has one each for rotations, gates, gated norms of
heads and short convolutions (`megamem.model.kernels`), and `training.compile` makes one each of all of these; the inner
chunks of deep memories have kernels of their own. A ledger that watches the CPU would see every step of them, and every
step's result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from megamem.memory.recurrent.deep import DeepMemory
from megamem.memory.recurrent.matrix import MatrixMixer
from megamem.memory.recurrent.memora import Memora
from megamem.memory.recurrent.short_convolution import ShortConvolution
from megamem.model.compiled import use_pointwise
from megamem.model.kernels import OPERATIONS, TAPS
from megamem.model.norm import rms_norm
from megamem.model.stage import Stage
from megamem.ops import fla
from megamem.ops.deep_memory.kernels import LONGEST, WIDEST, fitting
from megamem.ops.deep_memory.simplex import ReadGroup
from megamem.ops.linear_recurrence.fla import fla_recurrence
from megamem.ops.short_convolution import short_convolution
from megamem.planning.deep_memory_kernels import planned_kept_passes, planned_passes, planned_selected_passes
from megamem.planning.fla_kernels import PLANNED
from megamem.planning.ledger import joined
from megamem.planning.memora_kernels import planned_read_group
from megamem.planning.tensors import tensors_in

T = TypeVar("T")


def join_kernels(
    stage: Stage, kernels: Literal["cuda", "libraries", "compiled"], recurrence: Literal["torch", "fla"] = "torch"
) -> None:
    """Let a ledger see each norm of the stage as one kernel; also what libraries have kernels for, or all that is
    compiled, and the recurrences of matrix memories as the kernels of flash-linear-attention."""
    one = {rms_norm, *(operation.plain for operation in OPERATIONS if kernels == "libraries")} - {short_convolution}
    use_pointwise(stage, lambda function: as_one(function) if kernels == "compiled" or function in one else function)
    for module in stage.modules():
        if isinstance(module, ShortConvolution) and kernels == "libraries" and module.taps in TAPS:
            module.function = partial(fla.short_convolution, convolve=as_one(_convolved_rows))
        if isinstance(module, MatrixMixer) and recurrence == "fla":
            module.recurrence = partial(fla_recurrence, kernels=PLANNED)
        if isinstance(module, DeepMemory) and module.kernel == "triton" and len(module.names) == 2:
            if module.widths["key"] > WIDEST:
                continue
            if isinstance(module, Memora):
                module.read_group = partial(_planned_read_group, planned_read_group(module.precision))
            module.passes = partial(as_given, fitting(planned_passes(module.precision), module.config.inner_chunk))
            module.kept_passes = partial(as_given, planned_kept_passes(module.precision))
            module.selected_passes = partial(as_given, planned_selected_passes(module.precision))


def _convolved_rows(rows: Tensor, weight: Tensor) -> Tensor:
    """Return what the library's kernel makes of rows [B, tokens, channels] with weights [channels, taps]."""
    taps = weight.shape[1]
    joined = F.pad(rows.transpose(0, 1)[:, :, None], (0, 0, 0, 0, 0, 0, taps - 1, 0))
    return short_convolution(joined, weight[None])[0][:, :, 0].transpose(0, 1)


def as_given(made: T, *_: object) -> T:
    """Return what is given, whatever is asked."""
    return made


def _planned_read_group(planned: ReadGroup, query: Tensor, matrices: int) -> ReadGroup | None:
    """Return the planned kernels where Memora's have a part: one head asks each network, [B, H, 1, N, T, D]."""
    return planned if matrices == 2 and query.shape[2] == 1 and query.shape[-2] <= LONGEST else None


def as_one(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of tensors [...] as one kernel, which keeps them for a backward pass that is one kernel too."""

    def call(*given: Any) -> Any:
        return _Joined.apply(function, *given)

    return call


class _Joined(torch.autograd.Function):
    """A function as one operation of a ledger, forward and backward."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], *given: Any) -> Any:
        """Return what the function returns, one or several [...]; given: its operands, [...] where they are tensors."""
        ctx.function = function
        ctx.others = [None if isinstance(each, Tensor) else each for each in given]
        ctx.save_for_backward(*(each if isinstance(each, Tensor) else None for each in given))
        return joined(function, *given)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the operands that have one."""
        given = [
            other if tensor is None else tensor for tensor, other in zip(ctx.saved_tensors, ctx.others, strict=True)
        ]
        wanted = ctx.needs_input_grad[1:]

        def of_given(gradients: Sequence[Tensor], *given: Any) -> list[Tensor | None]:
            """Return gradients by the function's own backward pass, from those of its results [...]."""
            leaves = [
                x.detach().requires_grad_(needs) if isinstance(x, Tensor) else x
                for x, needs in zip(given, wanted, strict=True)
            ]
            with torch.enable_grad():
                results = tuple(tensors_in((ctx.function(*leaves),)))
            learning = [leaf for leaf, needs in zip(leaves, wanted, strict=True) if needs]
            found = iter(torch.autograd.grad(results, learning, gradients))
            return [next(found) if needs else None for needs in wanted]

        return None, *joined(of_given, gradients, *given)
