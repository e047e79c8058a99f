"""A memory that is a small network, trained on keys and values as they come: one inner chunk in matrix products.

Titans (Behrouz et al., 2024) and deep linear attention (paper 004), for M(x) = x + W1 s(W2 x) with s = GELU, or for a
single matrix, M(x) = x + W x; x itself may be left out. All inner gradients of an inner chunk are taken at the weights
it starts from; with rate b, decay a and momentum e of each token

    S_t = e_t S_{t-1} - b_t grad l(M; k_t, v_t),   M_t = a_t M_{t-1} + S_t,   y_t = M_t(q_t)
    l = |M(k) - v|^2, or -<M(k), v>

No weights are made per token: with r_i = dl/dM(k_i), z_i = W2 k_i, h_i = s(z_i), d_i = (W1^T r_i) s'(z_i) and
C[t, i] the weight of token i's gradient in M_t,

    u_t = (beta_t W2 + m_t S2) q_t - sum_i C[t, i] b_i (k_i . q_t) d_i
    y_t = q_t + (beta_t W1 + m_t S1) s(u_t) - sum_i C[t, i] b_i (h_i . s(u_t)) r_i

The gradient of each matrix is a sum of outer products, one per token: d_i k_i^T of W2, r_i h_i^T of W1, r_i k_i^T of W.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megamem.ops.linear_recurrence.torch import decay_ratios

Loss = Literal["l2", "dot"]


Weights = tuple[Tensor, ...]
"""W2 [batch, heads, inner, width] and W1 [batch, heads, width, inner]; or W alone [batch, heads, width, width]."""


Join = Callable[[int, Tensor, Tensor], Tensor]


class Pace(NamedTuple):
    """Of each token and head [batch, heads, tokens], 0 for tokens that are not to be seen."""

    rate: Tensor
    log_decay: Tensor | None = None
    log_momentum: Tensor | None = None
    seen: Tensor | None = None
    """1 for tokens that count, 0 for others; None if all do. Others must have rate, log_decay, log_momentum 0."""


class Weighing(NamedTuple):
    """What enters the memory after each token: the chunk's first weights, its first momentum, its gradients."""

    first: Tensor
    """beta [batch, heads, tokens, 1]"""
    momentum: Tensor | None
    """m [batch, heads, tokens, 1]"""
    gradients: Tensor
    """C [batch, heads, tokens, tokens], lower triangular"""
    last_momentum: Tensor | None
    """What of token i's gradient is in the momentum at the end [batch, heads, tokens, 1], and of the first momentum."""


def gelu_slope(x: Tensor) -> Tensor:
    """Derivative of the (exact) GELU."""
    normal = torch.exp(-0.5 * x.square()) * 0.3989422804014327  # 1 / sqrt(2 pi)
    return 0.5 * (1 + torch.erf(x * 0.7071067811865476)) + x * normal


def weighing(pace: Pace) -> Weighing:
    """C and its kin from decays and momenta."""
    zero = torch.zeros_like(pace.rate)
    kept, decays = decay_ratios(zero if pace.log_decay is None else pace.log_decay)
    kept = kept.exp()
    if pace.log_momentum is None:
        return Weighing(kept[..., None], None, decays, None)
    # a token that is not seen adds no momentum to the memory
    adding = decays if pace.seen is None else decays * pace.seen[..., None, :]
    carried, momenta = decay_ratios(pace.log_momentum)
    carried = carried.exp()
    m = adding @ carried[..., None]
    last = torch.cat((momenta[..., -1, :, None], carried[..., -1:, None]), dim=-2)
    return Weighing(kept[..., None], m, adding @ momenta, last)


class _Tokens(NamedTuple):
    """Of an inner chunk: what enters the memory after each token, and of which tokens that is asked."""

    weights: Weighing
    rated: Tensor
    """C[t, i] b_i of the tokens that ask [batch, heads, 1, asking, tokens]"""
    asking: slice

    def through(self, x: Tensor, first: Tensor, carried: Tensor | None, inputs: Tensor, change: Tensor) -> Tensor:
        """x [batch, heads, groups, asking, ...] times a matrix as it is after each token, which is never made.

        first, carried: the matrix and its momentum as the inner chunk starts; change^T inputs: its gradient.
        """
        weights = self.weights
        out = weights.first[:, :, None, self.asking] * (x @ first.mT[:, :, None])
        if carried is not None and weights.momentum is not None:
            out = out + weights.momentum[:, :, None, self.asking] * (x @ carried.mT[:, :, None])
        return out - ((x @ inputs.mT[:, :, None]) * self.rated) @ change[:, :, None]


def deep_memory(
    query: Tensor, key: Tensor, value: Tensor, weights: Weights, momentum: Weights | None, pace: Pace, loss: Loss,
    residual: bool = True, join: Join | None = None,
) -> tuple[Tensor, Weights, Weights | None]:  # fmt: skip
    """Read and write the tokens of one inner chunk, in the dtype of `weights`.

    Args:
        query: [batch, heads, groups, asking, width], of the last `asking` of the tokens.
        key, value: [batch, heads, tokens, width], of all tokens since the inner chunk's start.
        weights, momentum: as the inner chunk starts; momentum None: there is none (pace.log_momentum None too).
        residual: whether M(x) has the term x.
        join: called with a matrix's number, what it is asked and what it answers; reading goes on with what it returns.
    Returns: y [batch, heads, groups, asking, width]; weights and momentum after the last token.
    """
    query, key, value = (x.to(weights[0].dtype) for x in (query, key, value))
    carried: tuple[Tensor | None, ...] = (None,) * len(weights) if momentum is None else momentum
    coefficients = weighing(pace)
    asking = slice(-query.shape[-2], None)
    rated = (coefficients.gradients[..., asking, :] * pace.rate[..., None, :])[:, :, None]
    tokens = _Tokens(coefficients, rated, asking)

    def error(active: Tensor) -> Tensor:
        """dl/dM(k), given what the last matrix reads."""
        if loss == "dot":
            return -value
        predicted = active @ weights[-1].mT
        return 2 * ((predicted + key if residual else predicted) - value)

    if len(weights) == 1:
        gradients = [(error(key), key)]
        asked = query
    else:
        up, down = weights
        hidden = key @ up.mT
        active = F.gelu(hidden)
        wrong = error(active)
        slope = (wrong @ down) * gelu_slope(hidden)
        gradients = [(slope, key), (wrong, active)]
        answered = tokens.through(query, up, carried[0], key, slope)
        asked = F.gelu(answered if join is None else join(0, query, answered))
    change, inputs = gradients[-1]
    read = tokens.through(asked, weights[-1], carried[-1], inputs, change)
    read = read if join is None else join(len(weights) - 1, asked, read)
    after, pushed = _after(weights, momentum, coefficients, pace.rate, gradients)
    return (query + read if residual else read), after, pushed


def _after(
    weights: Weights, momentum: Weights | None, coefficients: Weighing, rate: Tensor,
    gradients: list[tuple[Tensor, Tensor]],
) -> tuple[Weights, Weights | None]:  # fmt: skip
    """Weights and momentum after the last token."""
    final = (coefficients.gradients[..., -1, :] * rate)[..., None]
    after = tuple(
        coefficients.first[..., -1:, :] * matrix - (final * change).mT @ inputs
        for matrix, (change, inputs) in zip(weights, gradients, strict=True)
    )
    if momentum is None or coefficients.momentum is None or coefficients.last_momentum is None:
        return after, None
    after = tuple(
        matrix + coefficients.momentum[..., -1:, :] * carried for matrix, carried in zip(after, momentum, strict=True)
    )
    kept, start = coefficients.last_momentum[..., :-1, :], coefficients.last_momentum[..., -1:, :]
    pushed = kept * rate[..., None]
    return after, tuple(
        start * carried - (pushed * change).mT @ inputs
        for carried, (change, inputs) in zip(momentum, gradients, strict=True)
    )


def read_memory(query: Tensor, weights: Weights, residual: bool = True) -> Tensor:
    """M(q) of weights that stay as they are: query [batch, heads, groups, tokens, width], in the dtype of `weights`."""
    query = query.to(weights[0].dtype)
    asked = query if len(weights) == 1 else F.gelu(query @ weights[0].mT[:, :, None])
    read = asked @ weights[-1].mT[:, :, None]
    return query + read if residual else read
