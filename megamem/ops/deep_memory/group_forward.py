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

from megamem.ops.deep_memory.error import Loss, OutputNorm, output_error
from megamem.ops.deep_memory.network import Gelu, Weights, gelu


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


class Network(NamedTuple):
    """What a memory is, beside its numbers."""

    loss: Loss
    residual: bool
    eps: float | None
    """The number added to the layer norm's variance; None: there is no norm."""

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
    """What writing an inner chunk has made; tensors are [B, H, ...], or [B, H, N, ...] for all inner chunks."""

    weights: Weights
    """W, as the inner chunk starts."""
    momentum: Weights
    """S, as the inner chunk starts."""
    hidden: Tensor | None
    """z [T, I]; None of a single matrix, as `active` and `back`."""
    active: Gelu | None
    """h and its slope, [T, I]."""
    answered: Tensor
    """W1 h [T, D]"""
    back: Tensor | None
    """W1^T r [T, I]"""
    changes: tuple[Tensor, ...]
    """d [T, I] and r [T, D]; or r alone."""
    inputs: tuple[Tensor, ...]
    """k [T, D] and h [T, I]; or k alone."""


def shares_at(shares: Shares, n: int) -> Shares:
    """Return the shares of one inner chunk [B, H, ...]."""
    return Shares(*(None if x is None else x[:, :, n] for x in shares))  # type: ignore[arg-type]


def write(
    network: Network, tokens: Tokens, shares: Shares, weight: Tensor | None, start: Weights, added: Weights,
    momentum: Weights,
) -> tuple[list[Written], Weights, Weights]:  # fmt: skip
    """Write inner chunks one after the other.

    weight: of the norm [H, D]; start: [H, out, in] each, or nothing; added, momentum: [B, H, out, in] each.
    Returns: what each has made; what has been added, and the momentum, after the last one.
    """
    written, norm = [], network.norm(weight)
    for n, (key, value) in enumerate(zip(tokens.key.unbind(2), tokens.value.unbind(2), strict=True)):
        weights = tuple(map(torch.add, start, added)) if start else added
        last, hidden, active, back = weights[-1], None, None, None
        if len(weights) == 2:
            hidden = key @ weights[0].mT
            active = gelu(hidden)
        read = key if active is None else active.value
        answered = read @ last.mT
        wrong = output_error(answered, key, value, network.loss, network.residual, norm)
        changes: tuple[Tensor, ...] = (wrong,)
        inputs: tuple[Tensor, ...] = (read,)
        if active is not None:
            back = wrong @ last
            changes, inputs = (back * active.slope, wrong), (key, read)
        written.append(Written(weights, momentum, hidden, active, answered, back, changes, inputs))
        added, momentum = _after(shares_at(shares, n), written[-1], added)
    return written, added, momentum


def _after(shares: Shares, written: Written, added: Weights) -> tuple[Weights, Weights]:
    """Return what has been added [B, H, out, in], and the momentum, after an inner chunk."""
    after, momenta = [], []
    for i, (change, inputs) in enumerate(zip(written.changes, written.inputs, strict=True)):
        now = added[i] - (shares.step * change).mT @ inputs
        if shares.lost is not None:
            # small beside the weights themselves, so it is added to what has been added
            now = now + shares.lost * written.weights[i]
        if shares.momentum is not None:
            assert shares.last_carried is not None
            assert shares.momentum_step is not None
            carried = written.momentum[i]
            now = now + shares.last_carried * carried
            momenta.append(shares.momentum * carried - (shares.momentum_step * change).mT @ inputs)
        after.append(now)
    return tuple(after), tuple(momenta)


def side_by_side(written: Sequence[Written]) -> Written:
    """Put inner chunks beside each other: [B, H, N, ...]."""

    def stacked(parts: Sequence[Tensor]) -> Tensor:
        """Stack tensors [B, H, ...] of all inner chunks."""
        return torch.stack(list(parts), dim=2)

    def each(parts: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Stack tuples of tensors [B, H, ...]."""
        return tuple(map(stacked, zip(*parts, strict=True)))

    return Written(
        each([part.weights for part in written]), each([part.momentum for part in written]),
        None, None, written[0].answered, None,
        each([part.changes for part in written]), each([part.inputs for part in written]),
    )  # fmt: skip


def product(x: Tensor, shares: Shares, written: Written, i: int) -> Tensor:
    """Return x_t A_t^T [B, H, N, Q, out], where A_t is matrix i as it is after token t; x [B, H, N, Q, in]."""
    out = x @ written.weights[i].mT
    if shares.first is not None:
        out = shares.first * out
    if shares.carried is not None:
        out = out + shares.carried * (x @ written.momentum[i].mT)
    return out - ((x @ written.inputs[i].mT) * shares.rated) @ written.changes[i]


def read(query: Tensor, shares: Shares, written: Written) -> Tensor:
    """Return what the last matrix makes, before the norm, of queries of all inner chunks; both [B, H, N, Q, D]."""
    if len(written.weights) == 1:
        return product(query, shares, written, 0)
    return product(F.gelu(product(query, shares, written, 0)), shares, written, 1)
