"""How far a deep memory's answer is from a value: the inner loss, and its gradient at what the last matrix makes.

The answer to a key is M(k) = k + y, with y what the last matrix of the network makes, or its layer norm, M(k) = k + g n
with n = (y - mean(y)) / s, s the standard deviation of y over its channels and g a learned weight (Behrouz et al.,
"Memory Caching: RNNs with Growing Memory", appendix B; "It's All Connected" (Miras)). The term k may be left out.

    dl/dy = (a - mean(a) - n mean(a n)) / s,   a = g dl/dM(k)

Without the norm dl/dy = dl/dM(k).

Letters of shapes: B batch rows, H key/value heads, T tokens, D width of a head.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Loss = Literal["l2", "dot"]
"""The inner loss l: the squared error |M(k) - v|^2 (Titans), or the negative dot product -<M(k), v> (DLA)."""


def standardized(y: Tensor, eps: float) -> Tensor:
    """Return y [..., D] with mean 0 and variance 1."""
    return F.layer_norm(y, y.shape[-1:], eps=eps)


def standardized_gradients(out: Tensor, y: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the gradient of y [..., D], given that of `standardized`, `out`; and what that returns, n [..., D]."""
    normed, mean, inverse = torch.native_layer_norm(y, y.shape[-1:], None, None, eps)
    of_y: Tensor = torch.ops.aten.native_layer_norm_backward(
        out, y, y.shape[-1:], mean, inverse, None, None, [True, False, False]
    )[0]
    return of_y, normed


class OutputNorm(NamedTuple):
    """Layer norm of what the last matrix of each head's network makes, without a bias."""

    weight: Tensor
    """g [H, D]"""
    eps: float

    def __call__(self, y: Tensor) -> Tensor:
        """Return the layer norm of y [B, H, ..., D]."""
        return self.weighted(standardized(y, self.eps))

    def weighted(self, x: Tensor) -> Tensor:
        """Return x [B, H, ..., D] times each head's weight."""
        return x * self.weight.view(len(self.weight), *[1] * (x.ndim - 3), -1)


def output_error(
    y: Tensor, key: Tensor, value: Tensor, loss: Loss, residual: bool, norm: OutputNorm | None
) -> Tensor:  # fmt: skip
    """Return r = dl/dy of each token; y, key, value and r are [B, H, T, D].

    Args:
        y: what the last matrix makes of each key.
        residual: whether M(k) has the term k.
        norm: the layer norm of y; None: there is none.
    """
    if norm is None:
        return _loss_slope(y, key, value, loss, residual)
    unit, inverse = _unit(y, norm.eps)
    a = norm.weighted(_loss_slope(norm.weighted(unit), key, value, loss, residual))
    return inverse * (a - a.mean(-1, keepdim=True) - unit * (a * unit).mean(-1, keepdim=True))


def error_gradients(
    error: Tensor, y: Tensor, key: Tensor, value: Tensor, loss: Loss, residual: bool, norm: OutputNorm | None
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]:  # fmt: skip
    """Return the gradients of y, key, value [B, H, T, D] and the norm's weight [H, D], given that of `output_error`.

    error: the gradient of r [B, H, T, D]; the rest as in `output_error`. None stands for zeros.
    """
    squared, through_key = loss == "l2", loss == "l2" and residual
    if norm is None:
        twice = 2 * error
        return (twice, twice if residual else None, -twice, None) if squared else (None, None, -error, None)
    unit, inverse = _unit(y, norm.eps)
    slope = _loss_slope(norm.weighted(unit), key, value, loss, residual)
    a = norm.weighted(slope)
    # r = P a / s with the symmetric projection P = 1 - mean - n mean(n .)
    projected = a - a.mean(-1, keepdim=True) - unit * (a * unit).mean(-1, keepdim=True)
    scaled = inverse * error
    of_a = scaled - scaled.mean(-1, keepdim=True) - unit * (scaled * unit).mean(-1, keepdim=True)
    of_unit = -scaled * (a * unit).mean(-1, keepdim=True) - a * (scaled * unit).mean(-1, keepdim=True)
    of_slope = norm.weighted(of_a)
    of_weight = of_a * slope
    if squared:
        of_unit = of_unit + 2 * norm.weighted(of_slope)
        of_weight = of_weight + 2 * of_slope * unit
    of_inverse = (error * projected).sum(-1, keepdim=True)
    of_y = _through_unit(of_unit, unit, inverse, of_inverse)
    factor = 2 if squared else 1
    return of_y, 2 * of_slope if through_key else None, -factor * of_slope, of_weight.sum((0, 2))


def norm_gradients(out: Tensor, y: Tensor, norm: OutputNorm) -> tuple[Tensor, Tensor]:
    """Return the gradients of y [B, H, ..., D] and of the weight [H, D], given that of the layer norm of y, `out`."""
    unit, inverse = _unit(y, norm.eps)
    of_weight = (out * unit).transpose(0, 1).flatten(1, -2).sum(1)
    return _through_unit(norm.weighted(out), unit, inverse, None), of_weight


def _unit(y: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return n, y [..., D] with mean 0 and variance 1, and 1 / s [..., 1]."""
    centered = y - y.mean(-1, keepdim=True)
    inverse = (centered.square().mean(-1, keepdim=True) + eps).rsqrt()
    return centered * inverse, inverse


def _through_unit(of_unit: Tensor, unit: Tensor, inverse: Tensor, of_inverse: Tensor | None) -> Tensor:
    """Return the gradient of y from those of n [..., D] and, if it was used besides, of 1 / s [..., 1]."""
    # d(1/s)/dy = -n / (s^2 D), and n = (y - mean(y)) / s
    by_inverse = (of_unit * unit).mean(-1, keepdim=True)
    if of_inverse is not None:
        by_inverse = by_inverse + inverse * of_inverse / unit.shape[-1]
    of_y = inverse * (of_unit - unit * by_inverse)
    return of_y - of_y.mean(-1, keepdim=True)


def _loss_slope(answer: Tensor, key: Tensor, value: Tensor, loss: Loss, residual: bool) -> Tensor:
    """Return dl/dM(k) of tokens whose answers are M(k) - k, or M(k) without the residual; all [B, H, T, D]."""
    if loss == "dot":
        return -value
    return 2 * ((answer + key if residual else answer) - value)
