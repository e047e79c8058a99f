"""Functions that a device runs as one kernel, though the CPU runs them as many operations.

torch has one kernel for the RMS norm on CUDA, and `training.compile` makes one each of norms, rotations and gates. A
ledger that watches the CPU would see every step of them, and every step's result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megamem.model.compiled import use_pointwise
from megamem.model.mlp import gated
from megamem.model.norm import rms_norm
from megamem.model.stage import Stage
from megamem.ops.rotary import apply_rotary
from megamem.planning.ledger import joined


def join_kernels(stage: Stage, compiled: bool) -> None:
    """Let a ledger see each norm of the stage as one kernel; if `compiled`, rotations and gates too."""
    use_pointwise(
        stage, as_one(rms_norm), *(as_one(function) if compiled else function for function in (gated, apply_rotary))
    )


def as_one(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function of tensors [...] as one kernel, which keeps them for a backward pass that is one kernel too."""

    def call(*given: Any) -> Tensor:
        out: Tensor = _Joined.apply(function, *given)
        return out

    return call


class _Joined(torch.autograd.Function):
    """A function as one operation of a ledger, forward and backward."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *given: Any) -> Tensor:
        """Return what the function returns, [...]; given: its operands, [...] where they are tensors."""
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

        def of_given(gradient: Tensor, *given: Any) -> list[Tensor | None]:
            """Return gradients by the function's own backward pass, from that of its result [...]."""
            leaves = [
                x.detach().requires_grad_(needs) if isinstance(x, Tensor) else x
                for x, needs in zip(given, wanted, strict=True)
            ]
            with torch.enable_grad():
                out = ctx.function(*leaves)
            learning = [leaf for leaf, needs in zip(leaves, wanted, strict=True) if needs]
            found = iter(torch.autograd.grad(out, learning, gradient))
            return [next(found) if needs else None for needs in wanted]

        return None, *joined(of_given, gradients[0], *given)
