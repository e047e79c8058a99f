"""The forward pass of a group of inner chunks of a deep memory: writing one after the other, reading all at once.

The equations are those of `network.py`. Letters of shapes: B batch rows, H key/value heads, N inner chunks, T tokens
of each, Q queries of each (T times the heads that share a memory), D width of a head, I inner width of the network. A
single matrix W is the last of two: then its inputs are the keys and queries themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megamem.ops.deep_memory.error import Loss, OutputNorm
from megamem.ops.deep_memory.network import Weights
from megamem.ops.deep_memory.pointwise import PLAIN, Pointwise
from megamem.ops.deep_memory.products import product_into, subtract_product


class Shares(NamedTuple):
    """How much of each token's gradient, of the first weights and of the first momentum is in a memory, by inner chunk.

    None for what there is not: momentum, or decay (then all of the first weights is there).
    """

    rated: Tensor
    """R = C[t, i] b_i [B, H, N, Q, T], after each query's token."""
    first: Tensor | None
    """beta_t [B, H, N, Q, 1]"""
    carried: Tensor | None
    """m_t [B, H, N, Q, 1]"""
    step: Tensor
    """f = R after the last token, [B, H, N, T, 1]."""
    lost: Tensor | None
    """c = beta - 1 after the last token, [B, H, N, 1, 1]."""
    last_carried: Tensor | None
    """m after the last token, [B, H, N, 1, 1]."""
    momentum_step: Tensor | None
    """p: share of each token's gradient in the last momentum, times its rate, [B, H, N, T, 1]."""
    momentum: Tensor | None
    """e: share of the first momentum in the last, [B, H, N, 1, 1]."""


OF_QUERIES = 3
"""Of the fields of `Shares`, those that only reads need; they come first."""


class Network(NamedTuple):
    """What a memory is, beside its numbers."""

    loss: Loss
    residual: bool
    eps: float | None
    """The number added to the layer norm's variance; None: there is no norm."""
    pointwise: Pointwise = PLAIN
    """Its functions that are no matrix products, compiled or not."""

    def norm(self, weight: Tensor | None) -> OutputNorm | None:
        """Return the layer norm with a weight [H, D]."""
        return None if self.eps is None or weight is None else OutputNorm(weight, self.eps)


class Tokens(NamedTuple):
    """Queries, keys and values of a group of inner chunks."""

    query: Tensor
    """[B, H, N, Q, D]"""
    key: Tensor
    """[B, H, N, T, D]"""
    value: Tensor
    """[B, H, N, T, D]"""


class Written(NamedTuple):
    """What writing the inner chunks of a group has made."""

    weights: Weights
    """W as each inner chunk starts, [B, H, N, out, in]."""
    momentum: Weights
    """S as each inner chunk starts, [B, H, N, out, in]; empty if there is none."""
    hidden: Tensor | None
    """z [B, H, N, T, I]; None of a single matrix, as `back`."""
    back: Tensor | None
    """W1^T r [B, H, N, T, I]"""
    answered: Tensor
    """What the last matrix makes, [B, H, N, T, D]."""
    changes: tuple[Tensor, ...]
    """d [B, H, N, T, I] and r [B, H, N, T, D]; or r alone."""
    inputs: tuple[Tensor, ...]
    """k [B, H, N, T, D] and h [B, H, N, T, I]; or k alone."""


def shares_at(shares: Shares, n: int) -> Shares:
    """Return the shares of one inner chunk [B, H, ...]."""
    return Shares(*(None if x is None else x[:, :, n] for x in shares))  # type: ignore[arg-type]


def write(
    network: Network, tokens: Tokens, shares: Shares, weight: Tensor | None, first: Weights, momentum: Weights
) -> tuple[Written, Weights, Weights]:
    """Write inner chunks one after the other.

    weight: of the norm [H, D]; first, momentum: W and S as the first one starts, [B, H, out, in] each.
    Returns: what each has made; W and S after the last one.
    """
    norm, pointwise, count = network.norm(weight), network.pointwise, tokens.key.shape[2]
    weights, carried = _Series(first, count), _Series(momentum, count)
    answered, wrongs = torch.empty_like(tokens.key), torch.empty_like(tokens.key)
    # z, W1^T r, h and d of both matrices' network; a single matrix has none
    hidden, back, active, slopes = (
        (tokens.key.new_empty(*tokens.key.shape[:-1], first[0].shape[-2]) for _ in range(4))
        if len(first) == 2
        else (None,) * 4
    )
    for n, (key, value) in enumerate(zip(tokens.key.unbind(2), tokens.value.unbind(2), strict=True)):
        now, last, read = weights.newest, weights.newest[-1], key
        if hidden is not None and active is not None:
            product_into(hidden[:, :, n], key, now[0].mT)
            read = torch.ops.aten.gelu.out(hidden[:, :, n], out=active[:, :, n])
        product_into(answered[:, :, n], read, last.mT)
        wrong = pointwise.output_error(answered[:, :, n], key, value, network.loss, network.residual, norm)
        wrongs[:, :, n] = wrong
        changes: tuple[Tensor, ...] = (wrong,)
        inputs: tuple[Tensor, ...] = (read,)
        if hidden is not None and back is not None and slopes is not None:
            product_into(back[:, :, n], wrong, last)
            torch.mul(back[:, :, n], pointwise.gelu_slope(hidden[:, :, n]), out=slopes[:, :, n])
            changes, inputs = (slopes[:, :, n], wrong), (key, read)
        _change(network, shares_at(shares, n), changes, inputs, weights, carried)
    all_changes = (wrongs,) if slopes is None else (slopes, wrongs)
    all_inputs = (tokens.key,) if active is None else (tokens.key, active)
    made = Written(weights.before, carried.before, hidden, back, answered, all_changes, all_inputs)
    return made, weights.newest, carried.newest


class _Series:
    """Matrices [B, H, out, in] as each inner chunk starts, side by side, and as the last one leaves them."""

    def __init__(self, first: Weights, count: int) -> None:
        """Begin with the first inner chunk's, of so many."""
        self.before = tuple(x.new_empty(*x.shape[:2], count, *x.shape[2:]) for x in first)
        """[B, H, N, out, in] each"""
        for series, x in zip(self.before, first, strict=True):
            series[:, :, 0] = x
        self.newest = first
        self._left = count

    def next(self) -> Weights:
        """Return room for the next inner chunk's matrices, which are the newest then; the last one's are apart."""
        self._left -= 1
        if self._left:
            at = -self._left
            self.newest = tuple(series[:, :, at] for series in self.before)
        else:
            self.newest = tuple(map(torch.empty_like, self.newest))
        return self.newest


def _change(
    network: Network, shares: Shares, changes: Sequence[Tensor], inputs: Sequence[Tensor], weights: _Series,
    carried: _Series,
) -> None:  # fmt: skip
    """Add W and S after an inner chunk, whose shares are [B, H, ...], to their series.

    changes: [B, H, T, out] of each matrix; inputs: [B, H, T, in].
    """
    before, momenta = weights.newest, carried.newest
    after, last_momenta = weights.next(), carried.next() if momenta else ()
    for i, (change, read) in enumerate(zip(changes, inputs, strict=True)):
        kept, kept_momentum = before[i], None
        if shares.lost is not None or momenta:
            momentum = momenta[i] if momenta else None
            kept, kept_momentum = network.pointwise.faded(
                before[i], momentum, shares.lost, shares.last_carried, shares.momentum
            )
        subtract_outer(kept, shares.step, change, read, out=after[i])
        if kept_momentum is not None and shares.momentum_step is not None:
            subtract_outer(kept_momentum, shares.momentum_step, change, read, out=last_momenta[i])


def subtract_outer(matrix: Tensor, share: Tensor, change: Tensor, inputs: Tensor, out: Tensor) -> None:
    """Write matrix - sum_t share_t change_t inputs_t^T to `out`.

    matrix and out: [B, H, out, in]; share: [B, H, T, 1]; change: [B, H, T, out]; inputs: [B, H, T, in].
    """
    # the narrower of the two is the cheaper one to multiply
    if inputs.shape[-1] <= change.shape[-1]:
        inputs = share * inputs
    else:
        change = share * change
    subtract_product(matrix, change.mT, inputs, out)


class Product(NamedTuple):
    """What queries of all inner chunks are answered by one matrix."""

    out: Tensor
    """[B, H, N, Q, out]"""
    scores: Tensor
    """inputs_i . x_t [B, H, N, Q, T]"""


def product(network: Network, x: Tensor, shares: Shares, written: Written, i: int) -> Product:
    """Return x_t A_t^T, where A_t is matrix i as it is after token t; x [B, H, N, Q, in]."""
    out = x @ written.weights[i].mT
    if shares.first is not None or shares.carried is not None:
        by_momentum = None if shares.carried is None else x @ written.momentum[i].mT
        out = network.pointwise.shared(out, shares.first, by_momentum, shares.carried)
    scores = x @ written.inputs[i].mT
    return Product(subtract_product(out, scores * shares.rated, written.changes[i], out=out), scores)


def read(network: Network, query: Tensor, shares: Shares, written: Written) -> Tensor:
    """Return what the last matrix makes, before the norm, of queries of all inner chunks; both [B, H, N, Q, D]."""
    if len(written.weights) == 1:
        return product(network, query, shares, written, 0).out
    return product(network, F.gelu(product(network, query, shares, written, 0).out), shares, written, 1).out
