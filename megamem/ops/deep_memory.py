"""A memory that is a small network, trained on keys and values as they come: one inner chunk in matrix products.

Titans (Behrouz et al., 2024) and deep linear attention (paper 004), for M(x) = x + W1 s(W2 x) with s = GELU. All inner
gradients of an inner chunk are taken at the weights it starts from; with rate b, decay a and momentum e of each token

    S_t = e_t S_{t-1} - b_t grad l(M; k_t, v_t),   M_t = a_t M_{t-1} + S_t,   y_t = M_t(q_t)
    l = |M(k) - v|^2, or -<M(k), v>

No weights are made per token: with r_i = dl/dM(k_i), z_i = W2 k_i, h_i = s(z_i), d_i = (W1^T r_i) s'(z_i) and
C[t, i] the weight of token i's gradient in M_t,

    u_t = (beta_t W2 + m_t S2) q_t - sum_i C[t, i] b_i (k_i . q_t) d_i
    y_t = q_t + (beta_t W1 + m_t S1) s(u_t) - sum_i C[t, i] b_i (h_i . s(u_t)) r_i
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megamem.ops.linear_recurrence import decay_ratios

Loss = Literal["l2", "dot"]


class Network(NamedTuple):
    """W2 `up` [batch, heads, inner, width] and W1 `down` [batch, heads, width, inner]; or their momentum."""

    up: Tensor
    down: Tensor


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


def deep_memory(
    query: Tensor, key: Tensor, value: Tensor, network: Network, momentum: Network | None, pace: Pace, loss: Loss
) -> tuple[Tensor, Network, Network | None]:
    """Read and write the tokens of one inner chunk, in the dtype of `network`.

    Args:
        query: [batch, heads, groups, asking, width], of the last `asking` of the tokens.
        key, value: [batch, heads, tokens, width], of all tokens since the inner chunk's start.
        network, momentum: as the inner chunk starts; momentum None: there is none (pace.log_momentum None too).
    Returns: y [batch, heads, groups, asking, width]; network and momentum after the last token.
    """
    query, key, value = (x.to(network.up.dtype) for x in (query, key, value))
    weights = weighing(pace)
    asking = query.shape[-2]
    hidden = key @ network.up.mT
    active = F.gelu(hidden)
    error = -value if loss == "dot" else 2 * (key + active @ network.down.mT - value)
    slope = (error @ network.down) * gelu_slope(hidden)
    last = slice(-asking, None)
    rated = (weights.gradients[..., last, :] * pace.rate[..., None, :])[:, :, None]

    def through(x: Tensor, first: Tensor, carried: Tensor | None, overlap: Tensor, change: Tensor) -> Tensor:
        """x times the weights after each token, which are never made."""
        out = weights.first[:, :, None, last] * (x @ first[:, :, None])
        if carried is not None and weights.momentum is not None:
            out = out + weights.momentum[:, :, None, last] * (x @ carried[:, :, None])
        return out - (overlap * rated) @ change[:, :, None]

    carried_up, carried_down = (None, None) if momentum is None else (momentum.up.mT, momentum.down.mT)
    asked = F.gelu(through(query, network.up.mT, carried_up, query @ key[:, :, None].mT, slope))
    read = query + through(asked, network.down.mT, carried_down, asked @ active[:, :, None].mT, error)

    final = (weights.gradients[..., -1, :] * pace.rate)[..., None]
    after = _moved(network, momentum, weights, final, slope, error, key, active)
    if momentum is None or weights.last_momentum is None:
        return read, after, None
    kept, start = weights.last_momentum[..., :-1, :], weights.last_momentum[..., -1:, :]
    pushed = kept * pace.rate[..., None]
    return read, after, Network(
        start * momentum.up - (pushed * slope).mT @ key, start * momentum.down - (pushed * error).mT @ active
    )  # fmt: skip


def _moved(
    network: Network, momentum: Network | None, weights: Weighing, final: Tensor, slope: Tensor, error: Tensor,
    key: Tensor, active: Tensor,
) -> Network:  # fmt: skip
    """The weights after the last token."""
    up = weights.first[..., -1:, :] * network.up - (final * slope).mT @ key
    down = weights.first[..., -1:, :] * network.down - (final * error).mT @ active
    if momentum is not None and weights.momentum is not None:
        up, down = (
            up + weights.momentum[..., -1:, :] * momentum.up,
            down + weights.momentum[..., -1:, :] * momentum.down,
        )
    return Network(up, down)
