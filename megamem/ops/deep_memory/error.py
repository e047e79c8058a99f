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

import torch.nn.functional as F
from torch import Tensor

Loss = Literal["l2", "dot"]
"""The inner loss l: the squared error |M(k) - v|^2 (Titans), or the negative dot product -<M(k), v> (DLA)."""


def standardized(y: Tensor, eps: float) -> Tensor:
    """Return y [..., D] with mean 0 and variance 1."""
    return F.layer_norm(y, y.shape[-1:], eps=eps)


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
    centered = y - y.mean(-1, keepdim=True)
    inverse = (centered.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    unit = centered * inverse
    a = norm.weighted(_loss_slope(norm.weighted(unit), key, value, loss, residual))
    return inverse * (a - a.mean(-1, keepdim=True) - unit * (a * unit).mean(-1, keepdim=True))


def _loss_slope(answer: Tensor, key: Tensor, value: Tensor, loss: Loss, residual: bool) -> Tensor:
    """Return dl/dM(k) of tokens whose answers are M(k) - k, or M(k) without the residual; all [B, H, T, D]."""
    if loss == "dot":
        return -value
    return 2 * ((answer + key if residual else answer) - value)
