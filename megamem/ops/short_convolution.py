"""Short causal convolutions over tokens, one filter for each channel, and the SiLU that follows.

z_t = sum_j w_j x_{t - taps + 1 + j},   y_t = SiLU(z_t)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def short_convolution(joined: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Convolve tokens that follow taps - 1 others.

    Args:
        joined: those and the tokens, [taps - 1 + T, B, heads, width].
        weight: w, [heads, width, taps].
    Returns: y [T, B, heads, width]; the last taps - 1 tokens, which the next ones will follow.
    """
    z, last = convolved(joined, weight)
    return F.silu(z), last


def convolved(joined: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return z in the place of y; see `short_convolution` ([T, B, heads, width])."""
    if torch.compiler.is_compiling():
        # the compiler makes one kernel of all taps, forward and backward
        tokens = len(joined) - weight.shape[-1] + 1
        terms = [joined[tap : tap + tokens] * weight[..., tap] for tap in range(weight.shape[-1])]
        return sum(terms[1:], terms[0]), joined[tokens:].clone()
    z, last = _Convolution.apply(joined, weight)
    return z, last


class _Convolution(torch.autograd.Function):
    """The convolution, with a backward pass that adds each tap's gradient in place.

    Autograd would fill zeros around each tap's tokens, and then add them all.
    """

    @staticmethod
    def forward(ctx: Any, joined: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return z [T, B, heads, width] and the last tokens; see `short_convolution`."""
        ctx.save_for_backward(joined, weight)
        taps = weight.shape[-1]
        tokens = len(joined) - taps + 1
        z = joined[:tokens] * weight[..., 0]
        for tap in range(1, taps):
            z.addcmul_(joined[tap : tap + tokens], weight[..., tap])
        return z, joined[tokens:].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of `joined` and `weight`, from those of z and the last tokens (shapes as theirs)."""
        of_z, of_last = gradients
        joined, weight = ctx.saved_tensors
        taps, tokens = weight.shape[-1], len(of_z)
        of_joined = of_weight = None
        if ctx.needs_input_grad[0]:
            of_joined = torch.zeros_like(joined)
            of_joined[tokens:] = of_last
            for tap in range(taps):
                of_joined[tap : tap + tokens].addcmul_(of_z, weight[..., tap])
        if ctx.needs_input_grad[1]:
            sums = [(of_z * joined[tap : tap + tokens]).sum((0, 1)) for tap in range(taps)]
            of_weight = torch.stack(sums, dim=-1)
        return of_joined, of_weight
