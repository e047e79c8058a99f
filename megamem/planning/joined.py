"""Functions that a device runs as one kernel, though the CPU runs them as many operations.

torch has one kernel for the RMS norm on CUDA, flash-linear-attention has one each for rotations, gates and gated norms
of heads (`megamem.model.kernels`), and `training.compile` makes one each of norms, rotations, gates and short
convolutions; the inner chunks of deep memories have kernels of their own. A ledger that watches the CPU would
see every step of them, and every step's result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor

from megamem.memory.recurrent.deep import DeepMemory
from megamem.memory.recurrent.matrix import MatrixMixer
from megamem.model.compiled import use_pointwise
from megamem.model.kernels import OPERATIONS
from megamem.model.norm import rms_norm
from megamem.model.stage import Stage
from megamem.ops.deep_memory.group_backward import TORCH, GroupPasses, ReadGradients, Reads, WriteGradients
from megamem.ops.deep_memory.group_forward import Network, Shares, Tokens, Written
from megamem.ops.deep_memory.network import Precision, Weights
from megamem.ops.linear_recurrence.fla import fla_recurrence
from megamem.planning.fla_kernels import PLANNED
from megamem.planning.ledger import joined, joined_as
from megamem.planning.operations import Kind, Operation, touched
from megamem.planning.tensors import tensors_in


def join_kernels(
    stage: Stage, kernels: Literal["cuda", "libraries", "compiled"], recurrence: Literal["torch", "fla"] = "torch"
) -> None:
    """Let a ledger see each norm of the stage as one kernel; also what libraries have kernels for, or all that is
    compiled, and the recurrences of matrix memories as the kernels of flash-linear-attention."""
    one = {rms_norm, *(operation.plain for operation in OPERATIONS if kernels == "libraries")}
    use_pointwise(stage, lambda function: as_one(function) if kernels == "compiled" or function in one else function)
    for module in stage.modules():
        if isinstance(module, MatrixMixer) and recurrence == "fla":
            module.recurrence = partial(fla_recurrence, kernels=PLANNED)
        if isinstance(module, DeepMemory) and module.kernel == "triton" and len(module.names) == 2:
            own = _passes(module.precision)
            module.passes = lambda *_, own=own: own


def _passes(precision: Precision) -> GroupPasses:
    """Return both passes of a group of inner chunks by torch, as one kernel each in the eyes of a ledger.

    A kernel does the arithmetic of torch's products, of blocks that are filled up to powers of two. What it is given
    and what it returns goes through the device's memory once; what it reads again lies in the cache.
    """
    kind, products = {"tf32": (Kind.MATMUL_TF32, 1), "tf32x3": (Kind.MATMUL_TF32, 3), "ieee": (Kind.MATMUL_FP32, 1)}[
        precision
    ]

    def as_kernel(blocks: Tensor, per_head: bool, read: object, function: Callable[..., Any], *given: object) -> Any:
        """Return what a function returns that a kernel computes.

        blocks: [B, H, N, T, D], filled up; a program is for each of them, or if `per_head` for all N. read: what the
        kernel reads.
        """
        filled = products * math.prod(2 ** (size - 1).bit_length() / size for size in blocks.shape[-2:])
        programs = math.prod(blocks.shape[: 2 if per_head else 3])

        def kernel(steps: Sequence[Operation], out: object) -> Operation:
            """Return the kernel that does the work of these steps."""
            moved = {id(x): touched(x) for x in tensors_in((read, out))}
            return Operation(kind, filled * sum(step.flops for step in steps), sum(moved.values()), programs)

        return joined_as(kernel, function, *given)

    def write(
        network: Network, tokens: Tokens, shares: Shares, weight: Tensor | None, first: Weights, momentum: Weights
    ) -> tuple[Written, Weights, Weights]:
        """See `write` [B, H, ...]."""
        read = tokens.value, shares[OF_QUERIES:], weight, first, momentum
        given = network, tokens, shares, weight, first, momentum
        return cast("tuple[Written, Weights, Weights]", as_kernel(tokens.key, True, read, TORCH.write, *given))

    def read(network: Network, query: Tensor, shares: Shares, written: Written) -> Tensor:
        """See `read` [B, H, ...]."""
        moved = query, shares[:OF_QUERIES], _of_reads(written)
        given = network, query, shares, written
        return cast(Tensor, as_kernel(_blocks(query, written), False, moved, TORCH.read, *given))

    def through_reads(
        network: Network, query: Tensor, shares: Shares, weight: Tensor | None, written: Written, out: Tensor
    ) -> ReadGradients:
        """See `through_reads` [B, H, ...]."""
        norm, of_weight = network.norm(weight), None
        if norm is not None:
            out, of_weight = network.pointwise.norm_gradients(out, read(network, query, shares, written), norm)
        moved = query, shares[:OF_QUERIES], _of_reads(written), out
        given = network._replace(eps=None), query, shares, None, written, out
        found = as_kernel(_blocks(query, written), False, moved, TORCH.through_reads, *given)
        return cast(ReadGradients, found._replace(weight=of_weight))

    def through_writes(
        network: Network, tokens: Tokens, shares: Shares, weight: Tensor | None, written: Written,
        reads: Sequence[Reads], of_weights: Weights, of_momentum: Weights,
    ) -> WriteGradients:  # fmt: skip
        """See `through_writes` [B, H, ...]."""
        read = tokens.value, shares[OF_QUERIES:], weight, written, reads, of_weights, of_momentum
        given = network, tokens, shares, weight, written, reads, of_weights, of_momentum
        return cast(WriteGradients, as_kernel(tokens.key, True, read, TORCH.through_writes, *given))

    return GroupPasses(write, read, through_reads, through_writes)


def _of_reads(written: Written) -> object:
    """Return what reads need of what has been written."""
    return written.weights, written.momentum, written.changes, written.inputs


def _blocks(query: Tensor, written: Written) -> Tensor:
    """Return queries [B, H, N, G T, D] by the heads that ask, [B, H, N G, T, D]."""
    return query.unflatten(3, (-1, written.inputs[0].shape[-2])).flatten(2, 3)


OF_QUERIES = 3
"""Of the fields of `Shares`, those that only reads need; they come first."""


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
