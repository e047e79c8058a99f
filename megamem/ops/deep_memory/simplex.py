"""A memory that is a small network whose weights are distributions, one inner chunk in matrix products.

Memora (Behrouz et al., "It's All Connected" (Miras), 2025): rows of the matrices are softmaxes of logarithms, and a
step down the gradient of l = |M(k) - v|^2 is taken in the logarithms, which is gradient descent with a penalty on the
Kullback-Leibler divergence from the weights before. With rate b and decay a of each token and channel

    L_t = a_t L_{t-1} - b_t grad l(M; k_t, v_t),   W_t = c softmax(L_t),   y_t = M(W_t; q_t)

The softmax of every token's weights cannot be had without the weights. So within an inner chunk all gradients are taken
at the weights W_0 it starts from; its first token's W_1 is exact, and from there on weights move along a line,

    W_t = W_1 - sum_{1 < i <= t} b_i grad l(M; k_i, v_i)

while the logarithms L gather all of them for the next inner chunk. With inner chunks of one token nothing is
approximated.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megamem.ops.deep_memory.network import Join, Weights, gelu_slope


class ChannelPace(NamedTuple):
    """Of each token, head and channel [batch, heads, tokens, width]; 0 for tokens that are not to be seen."""

    rate: Tensor
    log_decay: Tensor
    first: Tensor
    """Number of each row's first token that is seen [batch], int64."""


def on_simplex(logs: Weights, scale: float | None) -> Weights:
    """c softmax over the inputs of each unit; c the root of their number if not given."""
    return tuple((matrix.shape[-1] ** 0.5 if scale is None else scale) * matrix.softmax(-1) for matrix in logs)


def simplex_memory(
    query: Tensor, key: Tensor, value: Tensor, logs: Weights, pace: ChannelPace, scale: float | None,
    residual: bool = True, join: Join | None = None,
) -> tuple[Tensor, Weights]:  # fmt: skip
    """Read and write the tokens of one inner chunk, in the dtype of `logs`.

    Args: as those of `deep_memory`; logs: L as the inner chunk starts, [batch, heads, inner, width] and
        [batch, heads, width, inner], or [batch, heads, width, width] of a single matrix. Rates and decays belong to the
        channels of a head: what the first matrix reads, what the last one answers.
    Returns: y [batch, heads, groups, asking, width]; L after the last token.
    """
    query, key, value = (x.to(logs[0].dtype) for x in (query, key, value))
    begin = on_simplex(logs, scale)
    up, down = begin[0], begin[-1]
    active = key
    if len(logs) == 2:
        hidden = key @ up.mT
        active = F.gelu(hidden)
    predicted = active @ down.mT
    wrong = 2 * ((predicted + key if residual else predicted) - value)
    # (of a unit's output, of its inputs) whose outer products are the gradients; channels on one side of each
    changes, inputs = [wrong], [active]
    if len(logs) == 2:
        changes, inputs = [(wrong @ down) * gelu_slope(hidden), wrong], [key, active]
    asking, tokens = query.shape[-2], key.shape[-2]
    here = pace.first[:, None, None, None]

    def first(x: Tensor) -> Tensor:
        return x.gather(2, here.expand(*x.shape[:2], 1, x.shape[-1]))

    alone = [first(x) for x in changes], [first(x) for x in inputs]
    started = on_simplex(_moved(logs, first(pace.log_decay)[:, :, 0], first(pace.rate), *alone), scale)
    # what joins W_1 token by token
    later = torch.arange(tokens, device=key.device)[:, None] != here
    rated = _rated(later * pace.rate, changes, inputs)
    causal = torch.ones(asking, tokens, dtype=torch.bool, device=key.device).tril(tokens - asking)

    def through(matrix: int, x: Tensor) -> Tensor:
        change, read = rated[matrix]
        scores = (x @ read.mT[:, :, None]).masked_fill(~causal, 0.0)
        answered = x @ started[matrix].mT[:, :, None] - scores @ change[:, :, None]
        return answered if join is None else join(matrix, x, answered)

    asked = query if len(logs) == 1 else F.gelu(through(0, query))
    read = through(len(logs) - 1, asked)
    total = pace.log_decay.cumsum(-2)
    until = (total[..., -1:, :] - total).exp()
    after = _moved(logs, total[..., -1, :], until * pace.rate, changes, inputs)
    return (query + read if residual else read), after


def _rated(rate: Tensor, changes: list[Tensor], inputs: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Changes and inputs, the rates multiplied into the side of the head's channels."""
    if len(changes) == 1:
        return [(rate * changes[0], inputs[0])]
    return [(changes[0], rate * inputs[0]), (rate * changes[1], inputs[1])]


def _moved(logs: Weights, log_decay: Tensor, rate: Tensor, changes: list[Tensor], inputs: list[Tensor]) -> Weights:
    """a L - sum_i b_i grad_i: log_decay [batch, heads, width], rate [batch, heads, tokens, width]."""
    kept = log_decay.exp()
    # channels are the columns of the first of two matrices, and the rows of the last
    kepts = [kept[..., :, None]] if len(logs) == 1 else [kept[..., None, :], kept[..., :, None]]
    return tuple(
        fraction * matrix - change.mT @ read
        for fraction, matrix, (change, read) in zip(kepts, logs, _rated(rate, changes, inputs), strict=True)
    )
