"""Continuous attention: what a query reads of a signal where a normal distribution says how closely it looks.

Martins, Marinho and Martins, "infinity-former: Infinite Memory Transformer", 2022, equations 10 and 11. Of a signal
sum_j v_j psi_j(t) with psi_j the density of N(c_j, w_j^2), a query that looks at t ~ N(mu, s) reads

    sum_j v_j E[psi_j(t)],    E[psi_j(t)] = density of N(c_j, w_j^2 + s) at mu

At every center stands one bump of each width, so that a query has as many variances w^2 + s as there are widths, not
bumps.

Letters of shapes: T queries, B batch rows, H heads, C centers, S widths, D width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def continuous_attention(mean: Tensor, variance: Tensor, value: Tensor, centers: Tensor, variances: Tensor) -> Tensor:
    """Read a signal by continuous attention.

    Args:
        mean, variance: of each query's look, [B, H, T] in float32 at least.
        value: v_j, [B, H, C S, D]; of each center all widths in a row.
        centers: [C] in the mean's dtype.
        variances: squared widths, [S] in the mean's dtype.
    Returns: [B, H, T, D] in the dtype of `value`.
    """
    # one width after the other, so that the bumps of a width lie side by side
    by_width = value.unflatten(2, (-1, len(variances))).transpose(2, 3).flatten(2, 3)
    out: Tensor = _ContinuousAttention.apply(mean, variance, by_width, centers, variances)
    return out


class _ContinuousAttention(torch.autograd.Function):
    """The closed form with few passes over all queries and bumps, forward and backward."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, variance: Tensor, value: Tensor, centers: Tensor, variances: Tensor) -> Tensor:
        """See `continuous_attention`; mean, variance: [B, H, T]; value: [B, H, S C, D]; the others [C] and [S]."""
        spread = variance[..., None] + variances  # [B, H, T, S]
        offsets = mean[..., None] - centers  # [B, H, T, C]
        bumps = offsets.square()[..., None, :] * (-0.5 / spread)[..., None]  # [B, H, T, S, C]
        bumps.exp_().mul_((2 * torch.pi * spread).rsqrt()[..., None])
        bumps = bumps.flatten(-2)
        ctx.save_for_backward(spread, offsets, bumps, value)
        return bumps.to(value.dtype) @ value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of mean, variance and value; gradient: [B, H, T, D].

        With z = mu - c, the density e has the derivatives -e z / s by mu and e (z^2 / s - 1) / (2 s) by s.
        """
        spread, offsets, bumps, value = ctx.saved_tensors
        of_value = bumps.to(value.dtype).transpose(2, 3) @ gradient
        weighted = (gradient @ value.transpose(2, 3)).to(bumps.dtype)
        weighted = weighted.mul_(bumps).unflatten(-1, (spread.shape[-1], -1))  # [B, H, T, S, C]
        moments = [weighted.sum(-1)]
        for _ in range(2):
            weighted.mul_(offsets[..., None, :])
            moments.append(weighted.sum(-1))
        of_mean = -(moments[1] / spread).sum(-1)
        of_variance = 0.5 * ((moments[2] / spread - moments[0]) / spread).sum(-1)
        return of_mean, of_variance, of_value, None, None
