"""A short stretch of a linear recurrence as the linear map that it is: of the tokens' values, and of S before them.

    S_t = a_t S_{t-1} + k_t w_t^T,   y_t = S_t^T q_t   (w_t as in `torch.py`: additive, or by the delta rule)
    Y = A V + Q' S_0,   S = K'^T V + S_0 + (P - I) S_0

With g_t = a_1 ... a_t, D[t, i] = g_t / g_i for i <= t, L the last token and rows of Q, K and V the tokens:

    additive: A = Q K^T * D,   Q' = g Q,   K' = g_L / g K,   P = g_L I
    delta:    N = (I + strictly lower part of b K K^T * D)^-1 diag(b),   A = (Q K^T * D) N,   Q' = g Q - A (g K),
              K' = N^T (g_L / g K),   P = g_L I - K'^T (g K)

Here * is elementwise. A weighs the value of each token by itself, so that values may count differently to each query,
as in log-linear attention (Guo et al., "Log-Linear Attention", 2025, section 3). P is what the tokens leave of all that
was written before them, their transition.

Letters of shapes: B batch rows, H heads, G queries that read one head's memory, T tokens, D and V widths of keys and
values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megamem.ops.linear_recurrence.torch import decay_ratios


class Unrolled(NamedTuple):
    """The parts of the linear map."""

    of_values: Tensor
    """A [B, H, G, T, T], lower triangular: how much of token i's value token t reads."""
    of_state: Tensor
    """Q' [B, H, G, T, D]: what S before the tokens is asked."""
    writes: Tensor
    """K' [B, H, T, D]: the key at which each token's value stands in S at the end."""
    transition: Tensor | None
    """P - I [B, H, D, D]; [B or 1, H, 1, 1] where P is a number; None where P = I."""


def unrolled(
    query: Tensor, key: Tensor, log_decay: Tensor | None, rate: Tensor | None, dtype: torch.dtype
) -> Unrolled:  # fmt: skip
    """Return the linear map of some tokens, in `dtype`: products of tokens by tokens, so for few of them.

    Args:
        query: [B, H, G, T, D]; G may be 0.
        key: [B, H, T, D].
        log_decay: log a_t <= 0, [B or 1, H, T]; None: a = 1.
        rate: b_t of the delta rule, [B, H, T]; None: additive.
    """
    query, key = query.to(dtype), key.to(dtype)
    tokens = key.shape[-2]
    reading, writing, erasing, left = query, key, key, None
    if log_decay is None:
        between = torch.ones(tokens, tokens, dtype=dtype, device=key.device).tril()
    else:
        total, between = decay_ratios(log_decay.to(dtype))
        since_start, until_end = total.exp()[..., None], (total[..., -1:] - total).exp()[..., None]
        reading, writing, erasing = query * since_start[:, :, None], key * until_end, key * since_start
        left = torch.expm1(total[..., -1:, None])
    scores = (query @ key.mT[:, :, None]) * between[..., None, :, :]
    if rate is None:
        return Unrolled(scores, reading, writing, left)
    rates = torch.diag_embed(rate.to(dtype))
    overlap = rate.to(dtype)[..., None] * (key @ key.mT) * between
    new = torch.linalg.solve_triangular(overlap.tril(-1), rates, upper=False, unitriangular=True)
    of_values = scores @ new[:, :, None]
    writes = new.mT @ writing
    transition = -writes.mT @ erasing
    if left is not None:
        transition = transition + left * torch.eye(key.shape[-1], dtype=dtype, device=key.device)
    return Unrolled(of_values, reading - of_values @ erasing[:, :, None], writes, transition)


def passed(transition: Tensor | None, x: Tensor) -> Tensor:
    """Return what a transition leaves of matrices that were written before it.

    Args:
        transition: P - I [..., D, D], or [..., 1, 1] where P is a number; None: everything is left.
        x: [..., D, V], or matrices of any shape where P is a number.
    Returns: P x, like x.
    """
    if transition is None:
        return x
    return x + (transition * x if transition.shape[-1] == 1 else transition @ x)
