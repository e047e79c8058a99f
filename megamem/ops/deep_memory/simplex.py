"""A memory that is a small network whose weights are distributions: one inner chunk in matrix products.

Memora (Behrouz et al., "It's All Connected" (Miras), 2025): each row of each matrix is a softmax of logarithms, and a
step down the gradient of l = |M(k) - v|^2 is taken in the logarithms, which is gradient descent with a penalty on the
Kullback-Leibler divergence from the weights before. With rate b and decay a of each token and channel

    W_t = c softmax(a_t log W_{t-1} - b_t grad l(M; k_t, v_t)),   y_t = M(W_t; q_t)

or, with z_t the number of each row that keeps its sum at c,

    log W_t = a_t log W_{t-1} - b_t grad l(M; k_t, v_t) - z_t

The softmax of every token's weights cannot be had without the weights. So within an inner chunk all gradients are taken
at the weights W_0 it starts from; its first token's W_1 is exact, and from there on weights move along a line,

    W_t = W_1 - sum_{1 < i <= t} b_i grad l(M; k_i, v_i)

while the logarithms gather all steps for the next inner chunk. Their z_t is taken to first order at W_0, too: the mean
of what a token adds to a row's logarithms, weighted by the row,

    z_t = sum_j W_0[j] / c ((a_t[j] - 1) log W_0[j] - b_t grad l[j])        j: the inputs of a row

It is needed where the decays within a row differ, in the first of two matrices, whose inputs are the head's channels.
Where a row has one decay the softmax takes every z_t out again, and none is computed. With inner chunks of one token
nothing is approximated.

Letters of shapes: B batch rows, H key/value heads, G query heads that share one of them, T tokens of the inner chunk so
far, Q the last tokens of them, which have queries, D width of a head, I inner width of the network.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megamem.ops.deep_memory.error import OutputNorm, output_error
from megamem.ops.deep_memory.network import Join, Weights
from megamem.ops.deep_memory.pointwise import gelu_slope


class ChannelRates(NamedTuple):
    """Learning rate and decay of each token, head and channel, [B, H, T, D]; 0 for tokens that do not count."""

    rate: Tensor
    """b"""
    log_decay: Tensor | None
    """log a; None: a = 1"""
    first: Tensor
    """Index of each batch row's first token that counts, [B] int64."""


def on_simplex(logs: Weights, scale: float | None) -> Weights:
    """Return c softmax(L) of each matrix L [B, H, out, in], over the inputs of each output.

    scale: c; the square root of the number of inputs if None.
    """
    return tuple(_row_sum(matrix, scale) * matrix.softmax(-1) for matrix in logs)


def _row_sum(matrix: Tensor, scale: float | None) -> float:
    """Return c of a matrix [..., out, in]."""
    return matrix.shape[-1] ** 0.5 if scale is None else scale


def simplex_memory(
    query: Tensor, key: Tensor, value: Tensor, logs: Weights, rates: ChannelRates, scale: float | None,
    residual: bool = True, norm: OutputNorm | None = None, join: Join | None = None,
) -> tuple[Tensor, Weights]:  # fmt: skip
    """Read and write the tokens of one inner chunk, in the dtype of `logs`.

    Args:
        query: [B, H, G, Q, D], of the last Q tokens.
        key, value: [B, H, T, D], of all tokens since the inner chunk's start.
        logs: L with W_0 = c softmax(L), [B, H, I, D] and [B, H, D, I], or [B, H, D, D] of a single matrix.
        rates: of the channels of a head, which are the inputs of the first matrix and the outputs of the last one.
        scale: c, see `on_simplex`.
        residual: whether M(x) has the term x.
        norm: the layer norm of what the last matrix makes; None: there is none.
        join: lets other memories take part in what each matrix answers.
    Returns: y [B, H, G, Q, D]; L after the last token.
    """
    query, key, value = (x.to(logs[0].dtype) for x in (query, key, value))
    # decays that differ within the rows of the first of two matrices act on log W itself
    uneven = len(logs) == 2 and rates.log_decay is not None
    if uneven:
        logs = (logs[0].log_softmax(-1) + math.log(_row_sum(logs[0], scale)), logs[1])
    # all gradients, at the weights W_0 of the inner chunk's start
    begin = on_simplex(logs, scale)
    up, down = begin[0], begin[-1]
    active = key
    if len(logs) == 2:
        hidden = key @ up.mT
        active, slope = F.gelu(hidden), gelu_slope(hidden)
    wrong = output_error(active @ down.mT, key, value, "l2", residual, norm)
    # the two factors of each matrix's gradient change_i inputs_i^T; the head's channels are on one side of each
    changes, inputs = [wrong], [active]
    if len(logs) == 2:
        changes, inputs = [(wrong @ down) * slope, wrong], [key, active]
    query_tokens, tokens = query.shape[-2], key.shape[-2]
    first_token = rates.first[:, None, None, None]

    def of_first_token(x: Tensor) -> Tensor:
        """Return [B, H, 1, width] of x [B, H, T, width]."""
        return x.gather(2, first_token.expand(*x.shape[:2], 1, x.shape[-1]))

    # W_1, exact: the first token's step in the logarithms
    decay = None if rates.log_decay is None else of_first_token(rates.log_decay)[:, :, 0].exp()
    steps = [of_first_token(x) for x in changes], [of_first_token(x) for x in inputs]
    after_first = on_simplex(_stepped(logs, decay, of_first_token(rates.rate), *steps), scale)
    # the steps that W_1 moves by: those of every token but the first
    is_later = torch.arange(tokens, device=key.device)[:, None] != first_token
    rated = _rated(is_later * rates.rate, changes, inputs)
    causal = torch.ones(query_tokens, tokens, dtype=torch.bool, device=key.device).tril(tokens - query_tokens)

    def product(matrix: int, x: Tensor) -> Tensor:
        """Return x_t W_t^T [B, H, G, Q, out] of x [B, H, G, Q, in], without making W_t."""
        change, read = rated[matrix]
        scores = (x @ read.mT[:, :, None]).masked_fill(~causal, 0.0)
        answered = x @ after_first[matrix].mT[:, :, None] - scores @ change[:, :, None]
        return answered if join is None else join(matrix, x, answered)

    last_inputs = query if len(logs) == 1 else F.gelu(product(0, query))
    read = product(len(logs) - 1, last_inputs)
    read = read if norm is None else norm(read)
    read = query + read if residual else read
    if rates.log_decay is None:
        return read, _stepped(logs, None, rates.rate, changes, inputs)
    # L after the last token: each step fades by the decays of the tokens after it
    total = rates.log_decay.cumsum(-2)
    until_end = (total[..., -1:, :] - total).exp()
    after = _stepped(logs, total[..., -1, :].exp(), until_end * rates.rate, changes, inputs)
    if uneven:
        z = _row_shifts(logs[0], scale, rates.log_decay, changes[0], rates.rate * inputs[0])
        after = (after[0] - z.mT @ until_end, after[1])
    return read, after


def _row_shifts(log_weights: Tensor, scale: float | None, log_decay: Tensor, change: Tensor, rated: Tensor) -> Tensor:
    """Return z_t, by which a token's step moves the logarithm of each row's sum, to first order at W_0: [B, H, T, I].

    log_weights: log W_0 [B, H, I, D]; log_decay: log a [B, H, T, D]; change [B, H, T, I] and rated [B, H, T, D]: the
    factors of b grad l.
    """
    shares = log_weights.exp() / _row_sum(log_weights, scale)
    return log_decay.expm1() @ (shares * log_weights).mT - change * (rated @ shares.mT)


def _rated(rate: Tensor, changes: list[Tensor], inputs: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return the factors of each matrix's gradient, rates multiplied into the side of the head's channels.

    rate: [B, H, T, D]; changes [B, H, T, out] and inputs [B, H, T, in], one of each per matrix.
    """
    if len(changes) == 1:
        return [(rate * changes[0], inputs[0])]
    return [(changes[0], rate * inputs[0]), (rate * changes[1], inputs[1])]


def _stepped(logs: Weights, decay: Tensor | None, rate: Tensor, changes: list[Tensor], inputs: list[Tensor]) -> Weights:
    """Return a L - sum_i b_i grad_i for each matrix L.

    decay: a [B, H, D], None for 1; rate: b [B, H, T, D]; changes [B, H, T, out] and inputs [B, H, T, in] per matrix.
    """
    if decay is not None:
        # the head's channels are the columns of the first of two matrices, and the rows of the last
        decays = [decay[..., :, None]] if len(logs) == 1 else [decay[..., None, :], decay[..., :, None]]
        logs = tuple(fraction * matrix for fraction, matrix in zip(decays, logs, strict=True))
    steps = _rated(rate, changes, inputs)
    return tuple(matrix - change.mT @ read for matrix, (change, read) in zip(logs, steps, strict=True))
