"""A memory that is a small network, trained on keys and values as they come: one inner chunk in matrix products.

Titans (Behrouz et al., "Titans: Learning to Memorize at Test Time", 2024, equations 11 to 17) and deep linear attention
(Behrouz et al., "Memory Caching: RNNs with Growing Memory", equation 10), for M(x) = x + LN(W1 s(W2 x)) with s = GELU,
or for a single matrix, M(x) = x + LN(W x). The layer norm LN and the term x may be left out. All gradients of an inner
chunk are taken at the weights M_0 that it starts from; with rate b, decay a and momentum e of each token

    S_t = e_t S_{t-1} - b_t grad l(M_0; k_t, v_t),   M_t = a_t M_{t-1} + S_t,   y_t = M_t(q_t)
    l = |M(k) - v|^2 (Titans), or -<M(k), v> (deep linear attention)

The gradient of each matrix is a sum of outer products, one per token, so that no weights are made per token. With

    z_i = W2 k_i, h_i = s(z_i)                  hidden layer of token i's key, before and after the GELU
    r_i = dl/d(W1 h_i)                          error at the last matrix, see `error.py`
    d_i = (W1^T r_i) s'(z_i)                    error at the hidden layer
    d_i k_i^T, r_i h_i^T; r_i k_i^T             gradients of W2 and W1; of the single matrix W
    C[t, i]                                     weight of token i's gradient in M_t
    beta_t, m_t                                 weights of M_0 and of S_0 in M_t

a query is answered by

    u_t = (beta_t W2 + m_t S2) q_t - sum_i C[t, i] b_i (k_i . q_t) d_i
    y_t = q_t + LN((beta_t W1 + m_t S1) s(u_t) - sum_i C[t, i] b_i (h_i . s(u_t)) r_i)

Letters of shapes: B batch rows, H key/value heads, G query heads that share one of them, T tokens of the inner chunk so
far, Q the last tokens of them, which have queries, D width of a head, I inner width of the network.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megamem.ops.deep_memory.error import Loss, OutputNorm, output_error
from megamem.ops.deep_memory.pointwise import gelu_slope
from megamem.ops.linear_recurrence.torch import decay_ratios

Weights = tuple[Tensor, ...]
"""W2 [B, H, I, D] and W1 [B, H, D, I]; or W alone, [B, H, D, D]."""

Precision = Literal["tf32", "tf32x3", "ieee"]
"""How products of kernels take their FP32 factors: 10 bits of the mantissa, three products of such parts, or all of
them."""

Join = Callable[[int, Tensor, Tensor], Tensor]
"""(number of a matrix, its inputs [B, H, G, Q, in], its outputs [B, H, G, Q, out]) -> the outputs to go on with."""


class InnerRates(NamedTuple):
    """Learning rate, decay and momentum of each token and head, [B, H, T]; all 0 for tokens that do not count."""

    rate: Tensor
    """b"""
    log_decay: Tensor | None = None
    """log a; None: a = 1"""
    log_momentum: Tensor | None = None
    """log e; None: there is no momentum"""
    seen: Tensor | None = None
    """1 for tokens that count, 0 for others; None if all do."""


class Coefficients(NamedTuple):
    """How much of what there was, and of each token's gradient, is in the memory after each token."""

    first: Tensor
    """beta [B, H, T, 1]: share of the weights that the inner chunk starts from."""
    momentum: Tensor | None
    """m [B, H, T, 1]: share of the momentum that it starts from."""
    gradients: Tensor
    """C [B, H, T, T], lower triangular: share of token i's gradient in the weights after token t."""
    last_momentum: Tensor | None
    """Share of each token's gradient, and last of the first momentum, in the momentum at the end: [B, H, T + 1, 1]."""


def coefficients(rates: InnerRates) -> Coefficients:
    """Return what the recurrence of weights and momentum comes to over an inner chunk.

    Without momentum M_t = (a_1 .. a_t) M_0 - sum_i (a_{i+1} .. a_t) b_i grad_i. With momentum
    S_j = (e_1 .. e_j) S_0 - sum_{i <= j} (e_{i+1} .. e_j) b_i grad_i enters at every token j and decays from there on:
    C[t, i] = sum_{i <= j <= t} (a_{j+1} .. a_t) (e_{i+1} .. e_j), m_t = sum_{j <= t} (a_{j+1} .. a_t) (e_1 .. e_j).
    """
    zero = torch.zeros_like(rates.rate)
    log_beta, decays = decay_ratios(zero if rates.log_decay is None else rates.log_decay)
    beta = log_beta.exp()
    if rates.log_momentum is None:
        return Coefficients(beta[..., None], None, decays, None)
    # a token that does not count adds no momentum to the memory: no term j
    adding = decays if rates.seen is None else decays * rates.seen[..., None, :]
    log_carried, momenta = decay_ratios(rates.log_momentum)
    carried = log_carried.exp()
    m = adding @ carried[..., None]
    last = torch.cat((momenta[..., -1, :, None], carried[..., -1:, None]), dim=-2)
    return Coefficients(beta[..., None], m, adding @ momenta, last)


class _Reader(NamedTuple):
    """What queries of the last Q tokens need to read a matrix as it is after each of these tokens."""

    shares: Coefficients
    rated: Tensor
    """C[t, i] b_i of the tokens t with queries, [B, H, 1, Q, T]."""
    tokens: slice
    """The tokens with queries."""

    def product(self, x: Tensor, first: Tensor, carried: Tensor | None, inputs: Tensor, change: Tensor) -> Tensor:
        """Return x_t A_t^T, where A_t is a matrix as it is after token t, which is never made.

        Args:
            x: [B, H, G, Q, in].
            first, carried: the matrix and its momentum as the inner chunk starts, [B, H, out, in].
            inputs, change: per token the two factors of its gradient change_i inputs_i^T, [B, H, T, in or out].
        Returns: [B, H, G, Q, out].
        """
        shares = self.shares
        out = shares.first[:, :, None, self.tokens] * (x @ first.mT[:, :, None])
        if carried is not None and shares.momentum is not None:
            out = out + shares.momentum[:, :, None, self.tokens] * (x @ carried.mT[:, :, None])
        # attention without softmax: scores (inputs_i . x_t) C[t, i] b_i, "values" change_i
        return out - ((x @ inputs.mT[:, :, None]) * self.rated) @ change[:, :, None]


def deep_memory(
    query: Tensor, key: Tensor, value: Tensor, weights: Weights, momentum: Weights | None, rates: InnerRates,
    loss: Loss, residual: bool = True, norm: OutputNorm | None = None, join: Join | None = None,
) -> tuple[Tensor, Weights, Weights | None]:  # fmt: skip
    """Read and write the tokens of one inner chunk, in the dtype of `weights`.

    Args:
        query: [B, H, G, Q, D], of the last Q tokens.
        key, value: [B, H, T, D], of all tokens since the inner chunk's start.
        weights, momentum: M_0 and S_0, as the inner chunk starts; momentum None: there is none, as `rates` says too.
        residual: whether M(x) has the term x.
        norm: the layer norm of what the last matrix makes; None: there is none.
        join: lets other memories take part in what each matrix answers.
    Returns: y [B, H, G, Q, D]; weights and momentum after the last token.
    """
    query, key, value = (x.to(weights[0].dtype) for x in (query, key, value))
    carried: tuple[Tensor | None, ...] = (None,) * len(weights) if momentum is None else momentum
    shares = coefficients(rates)
    reading = slice(-query.shape[-2], None)
    rated = (shares.gradients[..., reading, :] * rates.rate[..., None, :])[:, :, None]
    reader = _Reader(shares, rated, reading)

    def error(active: Tensor) -> Tensor:
        """Return r [B, H, T, D] from what the last matrix reads of each key, [B, H, T, in]."""
        if loss == "dot" and norm is None:
            return -value  # whatever the memory answers
        return output_error(active @ weights[-1].mT, key, value, loss, residual, norm)

    # gradients: the two factors of each matrix's gradient, (change, inputs)
    if len(weights) == 1:
        gradients = [(error(key), key)]
        last_inputs = query
    else:
        up, down = weights
        hidden = key @ up.mT  # z
        active, slope_at_hidden = F.gelu(hidden), gelu_slope(hidden)  # h, s'(z)
        wrong = error(active)  # r
        slope = (wrong @ down) * slope_at_hidden  # d
        gradients = [(slope, key), (wrong, active)]
        answered = reader.product(query, up, carried[0], key, slope)  # u
        last_inputs = F.gelu(answered if join is None else join(0, query, answered))
    change, inputs = gradients[-1]
    read = reader.product(last_inputs, weights[-1], carried[-1], inputs, change)
    read = read if join is None else join(len(weights) - 1, last_inputs, read)
    read = read if norm is None else norm(read)
    after, last_momentum = _after(weights, momentum, shares, rates.rate, gradients)
    return (query + read if residual else read), after, last_momentum


def _after(
    weights: Weights, momentum: Weights | None, shares: Coefficients, rate: Tensor,
    gradients: list[tuple[Tensor, Tensor]],
) -> tuple[Weights, Weights | None]:  # fmt: skip
    """Return weights and momentum after the last token.

    rate: b [B, H, T]; gradients: (change [B, H, T, out], inputs [B, H, T, in]) of each matrix.
    """
    # C[T, i] b_i, the share of each token's step in the last weights
    final = (shares.gradients[..., -1, :] * rate)[..., None]
    after = tuple(
        shares.first[..., -1:, :] * matrix - (final * change).mT @ inputs
        for matrix, (change, inputs) in zip(weights, gradients, strict=True)
    )
    if momentum is None or shares.momentum is None or shares.last_momentum is None:
        return after, None
    after = tuple(
        matrix + shares.momentum[..., -1:, :] * carried for matrix, carried in zip(after, momentum, strict=True)
    )
    # the same for the last momentum: its shares of each token's gradient, and of the first momentum
    of_tokens, of_first = shares.last_momentum[..., :-1, :], shares.last_momentum[..., -1:, :]
    steps = of_tokens * rate[..., None]
    return after, tuple(
        of_first * carried - (steps * change).mT @ inputs
        for carried, (change, inputs) in zip(momentum, gradients, strict=True)
    )
