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

Letters of shapes: B batch rows, H key/value heads, G query heads that share one of them, N inner chunks, T tokens of an
inner chunk so far, Q the last tokens of them, which have queries, D width of a head, I inner width of the network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megamem.ops.deep_memory.error import OutputNorm
from megamem.ops.deep_memory.network import Join, Weights
from megamem.ops.deep_memory.pointwise import PLAIN, Pointwise, simplex
from megamem.ops.slices import groups

GROUP = 8
"""Inner chunks that the backward pass computes anew at a time."""
ReadGroup = Callable[..., tuple[Tensor, ...]]
"""See `read_group`."""


class ChannelRates(NamedTuple):
    """Learning rate and decay of each token, head and channel, [B, H, ..., T, D]; 0 for tokens that do not count."""

    rate: Tensor
    """b"""
    log_decay: Tensor | None
    """log a; None: a = 1"""
    first: Tensor | None = None
    """Index of each batch row's first token that counts, [B] int64; None: 0 of all rows."""


class SimplexNetwork(NamedTuple):
    """Settings of Memora's network: what its weights do not say."""

    scale: float | None
    """c, see `on_simplex`."""
    residual: bool = True
    """Whether M(x) has the term x."""
    norm: OutputNorm | None = None
    """The layer norm of what the last matrix makes; None: there is none."""
    pointwise: Pointwise = PLAIN
    """The functions that are no matrix products, compiled or not."""


def on_simplex(logs: Weights, scale: float | None) -> Weights:
    """Return c softmax(L) of each matrix L [..., out, in], over the inputs of each output.

    scale: c; the square root of the number of inputs if None.
    """
    return tuple(simplex(matrix, row_sum(matrix, scale)) for matrix in logs)


def row_sum(matrix: Tensor, scale: float | None) -> float:
    """Return c of a matrix [..., out, in]."""
    return matrix.shape[-1] ** 0.5 if scale is None else scale


def simplex_memory(
    query: Tensor, key: Tensor, value: Tensor, logs: Weights, rates: ChannelRates, network: SimplexNetwork,
    join: Join | None = None,
) -> tuple[Tensor, Weights]:  # fmt: skip
    """Read and write the tokens of one inner chunk, in the dtype of `logs`.

    Args:
        query: [B, H, G, Q, D], of the last Q tokens.
        key, value: [B, H, T, D], of all tokens since the inner chunk's start.
        logs: L with W_0 = c softmax(L), [B, H, I, D] and [B, H, D, I], or [B, H, D, D] of a single matrix.
        rates: of the channels of a head, which are the inputs of the first matrix and the outputs of the last one.
        join: lets other memories take part in what each matrix answers.
    Returns: y [B, H, G, Q, D]; L after the last token.
    """
    query, key, value = (x.to(logs[0].dtype) for x in (query, key, value))
    faded = fading(rates)
    start = _start(network, logs, rates)
    gradient = _gradient(network, start, key, value)
    read = _read(network, query, start.logs, gradient, rates, join)
    return read, _after(network, start, gradient, rates, faded)


def simplex_memory_chunks(
    query: Tensor, key: Tensor, value: Tensor, logs: Weights, rates: ChannelRates, network: SimplexNetwork,
    group: int = GROUP, read: ReadGroup | None = None,
) -> tuple[Tensor, Weights]:  # fmt: skip
    """Read and write the tokens of whole inner chunks, in the dtype of `logs`.

    Only the logarithms at the starts of inner chunks follow from one another; what queries are answered is computed of
    all inner chunks of a group at once.

    Args:
        query: [B, H, G, N, T, D].
        key, value: [B, H, N, T, D].
        logs: L of the first inner chunk, see `simplex_memory`.
        rates: [B, H, N, T, D] each.
        group: inner chunks that the backward pass computes anew at a time.
        read: what computes a group, and goes back through it (`simplex_group.py`); `read_group` with autograd if not
            given, as for a single matrix.
    Returns: y [B, H, G, N, T, D]; L after the last token.
    """
    dtype, reads = logs[0].dtype, []
    query, key, value = query.movedim(2, 3).to(dtype), key.to(dtype), value.to(dtype)
    for of_group in groups((query, key, value, *rates[:2]), group, 2):
        answered, *after = (read or _anew)(network, *of_group, *logs)
        logs = tuple(after)
        reads.append(answered)
    return torch.cat(reads, dim=2).movedim(2, 3) if len(reads) > 1 else reads[0].movedim(2, 3), logs


def group_of_rows(
    apply: Callable[..., tuple[Tensor, ...]], network: SimplexNetwork, query: Tensor, key: Tensor, value: Tensor,
    rate: Tensor, log_decay: Tensor | None, *logs: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return what `read_group` does, by a function of the queries of all heads beside each other.

    apply: (network, query [B, H, N, Q, D], key, value, rate, log_decay, the fields of `Fading`, weight [H, D], *logs).
    query: [B, H, N, G, T, D]; the rest as in `read_group`.
    """
    faded = fading(ChannelRates(rate, log_decay))
    weight = None if network.norm is None else network.norm.weight
    read, *after = apply(network, query.flatten(3, 4), key, value, rate, log_decay, *faded, weight, *logs)
    return read.unflatten(3, query.shape[3:5]), *after


def _anew(*given: object) -> tuple[Tensor, ...]:
    """Return what `read_group` does; its backward pass keeps nothing and computes the group anew."""
    found: tuple[Tensor, ...] = checkpoint(read_group, *given, use_reentrant=False, preserve_rng_state=False)
    return found


def read_group(
    network: SimplexNetwork,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rate: Tensor,
    log_decay: Tensor | None,
    *logs: Tensor,
) -> tuple[Tensor, ...]:
    """Return y [B, H, N, G, T, D] and L after the last token.

    query: [B, H, N, G, T, D]; key, value, rate and log_decay: [B, H, N, T, D]; logs: L of the first inner chunk.
    """
    rates = ChannelRates(rate, log_decay)
    faded = fading(rates)
    starts, gradients, now = [], [], logs
    # parted once: the gradient of a slice would be a tensor of zeros as large as all inner chunks together
    parted = ([None] * key.shape[2] if x is None else x.unbind(2) for x in (key, value, *rates[:2], *faded))
    for own_key, own_value, own_rate, own_decay, *own_faded in zip(*parted, strict=True):
        own = ChannelRates(own_rate, own_decay)
        start = _start(network, now, own)
        gradient = _gradient(network, start, own_key, own_value)
        now = _after(network, start, gradient, own, Fading(*own_faded))
        starts.append(start.logs)
        gradients.append((*gradient.changes, *gradient.inputs[1:]))
    matrices = len(logs)
    stacked = [torch.stack(parts, 2) for parts in zip(*gradients, strict=True)]
    gradient = Gradient(tuple(stacked[:matrices]), (key, *stacked[matrices:]))
    all_logs = tuple(torch.stack(parts, 2) for parts in zip(*starts, strict=True))
    return _read(network, query, all_logs, gradient, rates, None), *now


class Start(NamedTuple):
    """The memory as an inner chunk starts, [..., out, in] of each matrix."""

    logs: Weights
    """L; of the first of two matrices log W_0 itself, where decays differ within its rows and act on it."""
    weights: Weights
    """W_0"""
    shifting: tuple[Tensor, Tensor] | None
    """W_0 and W_0 log W_0 of the first of two matrices, where the sums of its rows need z_t."""


def _start(network: SimplexNetwork, logs: Weights, rates: ChannelRates) -> Start:
    """Return the memory whose logarithms are L [..., out, in]."""
    if len(logs) == 1 or rates.log_decay is None:
        return Start(logs, on_simplex(logs, network.scale), None)
    exact, weights, entropies = network.pointwise.distribution(logs[0], row_sum(logs[0], network.scale))
    last = network.pointwise.simplex(logs[1], row_sum(logs[1], network.scale))
    return Start((exact, logs[1]), (weights, last), (weights, entropies))


class Gradient(NamedTuple):
    """The two factors of each matrix's gradient at W_0, change_i inputs_i^T; the head's channels are in one of them."""

    changes: tuple[Tensor, ...]
    """[..., T, out]"""
    inputs: tuple[Tensor, ...]
    """[..., T, in]"""


def _gradient(network: SimplexNetwork, start: Start, key: Tensor, value: Tensor) -> Gradient:
    """Return the gradient of each token's loss at the weights of the inner chunk's start; key, value: [..., T, D]."""
    down, pointwise = start.weights[-1], network.pointwise
    loss = ("l2", network.residual, network.norm)
    if len(start.weights) == 1:
        return Gradient((pointwise.output_error(key @ down.mT, key, value, *loss),), (key,))
    hidden = key @ start.weights[0].mT
    active = F.gelu(hidden)
    wrong = pointwise.output_error(active @ down.mT, key, value, *loss)
    return Gradient(((wrong @ down) * pointwise.gelu_slope(hidden), wrong), (key, active))


def _read(
    network: SimplexNetwork, query: Tensor, logs: Weights, gradient: Gradient, rates: ChannelRates, join: Join | None
) -> Tensor:  # fmt: skip
    """Return y [..., G, Q, D] of the last Q tokens; query: [..., G, Q, D]; logs: L as the inner chunks start."""
    query_tokens, tokens = query.shape[-2], gradient.changes[0].shape[-2]
    first = None if rates.first is None else rates.first[:, None, None, None]

    def of_first_token(x: Tensor) -> Tensor:
        """Return [..., 1, width] of x [..., T, width]."""
        return x[..., :1, :] if first is None else x.gather(2, first.expand(*x.shape[:2], 1, x.shape[-1]))

    # W_1, exact: the first token's step in the logarithms
    own = Gradient(*(tuple(map(of_first_token, factors)) for factors in gradient))
    decay = None if rates.log_decay is None else of_first_token(rates.log_decay)[..., 0, :].exp()
    steps = _rated(of_first_token(rates.rate), own)
    moved = _subtracted(_faded(logs, decay), steps)
    after_first = [network.pointwise.simplex(matrix, row_sum(matrix, network.scale)) for matrix in moved]
    # the steps that W_1 moves by: those of every token but the first
    is_later = torch.arange(tokens, device=query.device)[:, None] != (0 if first is None else first)
    rated = _rated(is_later * rates.rate, gradient)
    causal = torch.ones(query_tokens, tokens, dtype=torch.bool, device=query.device).tril(tokens - query_tokens)

    def product(matrix: int, x: Tensor) -> Tensor:
        """Return x_t W_t^T [..., G, Q, out] of x [..., G, Q, in], without making W_t."""
        change, read = rated[matrix]
        scores = (x @ read.mT.unsqueeze(-3)).masked_fill(~causal, 0.0)
        answered = x @ after_first[matrix].mT.unsqueeze(-3) - scores @ change.unsqueeze(-3)
        return answered if join is None else join(matrix, x, answered)

    last_inputs = query if len(logs) == 1 else F.gelu(product(0, query))
    read = product(len(logs) - 1, last_inputs)
    read = read if network.norm is None else network.norm(read)
    return query + read if network.residual else read


class Fading(NamedTuple):
    """What the decays of an inner chunk's tokens come to at its end; None where there are none."""

    whole: Tensor | None
    """The product of all of them, [..., D]."""
    after: Tensor | None
    """The product of those after each token, [..., T, D]."""


def fading(rates: ChannelRates) -> Fading:
    """Return what decays [..., T, D] come to."""
    if rates.log_decay is None:
        return Fading(None, None)
    total = rates.log_decay.cumsum(-2)
    return Fading(total[..., -1, :].exp(), (total[..., -1:, :] - total).exp())


def _after(network: SimplexNetwork, start: Start, gradient: Gradient, rates: ChannelRates, faded: Fading) -> Weights:
    """Return L after the last token, [..., out, in] each: each step fades by the decays of the tokens after it."""
    if faded.after is None:
        return _subtracted(start.logs, _rated(rates.rate, gradient))
    steps = _rated(faded.after * rates.rate, gradient)
    if start.shifting is not None and rates.log_decay is not None:
        # z_t, by which a token's step moves the logarithm of each row's sum, to first order at W_0
        scale = row_sum(start.logs[0], network.scale)
        rated = rates.rate / scale * gradient.inputs[0]
        z = _row_shifts(*start.shifting, rates.log_decay.expm1() / scale, gradient.changes[0], rated)
        change, read = steps[0]
        steps[0] = torch.cat((change, z), -2), torch.cat((read, faded.after), -2)
    return _subtracted(_faded(start.logs, faded.whole), steps)


def _row_shifts(weights: Tensor, entropies: Tensor, lost: Tensor, change: Tensor, rated: Tensor) -> Tensor:
    """Return z_t [..., T, I].

    weights, entropies: see `Start.shifting`; lost: (a - 1) / c [..., T, D]; change [..., T, I] and rated [..., T, D]:
    the factors of b grad l, the narrower one over c.
    """
    return lost @ entropies.mT - change * (rated @ weights.mT)


def _rated(rate: Tensor, gradient: Gradient) -> list[tuple[Tensor, Tensor]]:
    """Return the factors of each matrix's gradient, rates [..., T, D] multiplied into the side of the head's channels.

    Returns: [..., T, out] and [..., T, in] of each matrix.
    """
    changes, inputs = gradient
    if len(changes) == 1:
        return [(rate * changes[0], inputs[0])]
    return [(changes[0], rate * inputs[0]), (rate * changes[1], inputs[1])]


def _faded(logs: Weights, decay: Tensor | None) -> Weights:
    """Return a L of each matrix L [..., out, in]; decay: a [..., D], None for 1."""
    if decay is None:
        return logs
    # the head's channels are the columns of the first of two matrices, and the rows of the last
    decays = [decay[..., :, None]] if len(logs) == 1 else [decay[..., None, :], decay[..., :, None]]
    return tuple(fraction * matrix for fraction, matrix in zip(decays, logs, strict=True))


def _subtracted(logs: Weights, steps: Sequence[tuple[Tensor, Tensor]]) -> Weights:
    """Return L - sum_i change_i inputs_i^T of each matrix L [..., out, in], in one product each.

    steps: changes [..., T, out] and inputs [..., T, in] of each matrix.
    """
    found = []
    for matrix, (change, read) in zip(logs, steps, strict=True):
        flat = (x.flatten(0, -3) for x in (matrix, change.mT, read))
        found.append(torch.baddbmm(*flat, alpha=-1).view(matrix.shape))
    return tuple(found)
