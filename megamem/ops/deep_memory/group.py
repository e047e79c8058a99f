"""A memory that is a small network, over many whole inner chunks: fewer and larger products, and a backward by hand.

The equations are those of `network.py`. Of them only the weights at the starts of inner chunks follow from one another:

    write, one inner chunk after the other    z, h, r, d of each token, then the next weights and the next momentum
    read, all inner chunks at once            what the queries are answered, given all of these

`torch.autograd` would keep what every token has made in a network several times as wide as its head. Here a group of
inner chunks keeps its inputs, and the weights and momentum it starts from; its backward pass computes the rest anew.
With _x for the gradient of the loss at x, and W', S' the weights and momentum after an inner chunk:

    write   W' = W + c W + m S - sum_t f_t (change_t inputs_t^T)        for both matrices: d k^T, r h^T
            S' = e S - sum_t p_t (change_t inputs_t^T)
            _change_t = -(f_t _W' + p_t _S') inputs_t,   _inputs_t = -(f_t _W' + p_t _S')^T change_t
            _W = (1 + c) _W',   _S = m _W' + e _S'
            then back through d, r, h and z, in which W takes part too
    read    x_t A_t^T = beta_t x_t W^T + m_t x_t S^T - sum_i R[t, i] (inputs_i . x_t) change_i

Letters of shapes: B batch rows, H key/value heads, N inner chunks, T tokens of each, Q queries of each (T times those
that share a head), D width of a head, I inner width of the network. A single matrix W is the last of the two: then its
inputs are the keys and queries themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megamem.ops.deep_memory.error import Loss, OutputNorm
from megamem.ops.deep_memory.group_backward import TORCH, Gradient, GroupPasses, sum_of_gradients
from megamem.ops.deep_memory.group_forward import Network, Shares, Tokens
from megamem.ops.deep_memory.network import InnerRates, Weights, coefficients
from megamem.ops.deep_memory.pointwise import PLAIN, Pointwise
from megamem.ops.slices import groups

GROUP = 16
"""Inner chunks that the backward pass computes anew at a time."""


def _shares(rates: InnerRates, groups: int) -> Shares:
    """Return what gates [B, H, N, T] come to, for the queries of so many heads beside each other."""
    found = coefficients(rates)

    def of_queries(x: Tensor | None) -> Tensor | None:
        """Repeat x [B, H, N, T, ...] for each query head: [B, H, N, Q, ...]."""
        return x if x is None or groups == 1 else x.repeat(1, 1, 1, groups, 1)

    rate = rates.rate[..., None]
    rated = found.gradients * rate.mT
    decays, carried, of_momentum = rates.log_decay is not None, found.momentum, found.last_momentum
    first = found.first if decays else None
    lost = None if rates.log_decay is None else rates.log_decay.sum(-1).expm1()[..., None, None]
    queried = of_queries(rated)
    assert queried is not None
    return Shares(
        queried, of_queries(first), of_queries(carried), rated[..., -1:, :].mT, lost,
        None if carried is None else carried[..., -1:, :],
        None if of_momentum is None else of_momentum[..., :-1, :] * rate,
        None if of_momentum is None else of_momentum[..., -1:, :],
    )  # fmt: skip


def deep_memory_chunks(
    query: Tensor, key: Tensor, value: Tensor, start: Weights | None, added: Weights, momentum: Weights | None,
    rates: InnerRates, loss: Loss, residual: bool, norm: OutputNorm | None, group: int = GROUP,
    pointwise: Pointwise = PLAIN, passes: GroupPasses = TORCH,
) -> tuple[Tensor, Weights, Weights | None]:  # fmt: skip
    """Read and write the tokens of whole inner chunks, in the dtype of `added`.

    Args:
        query: [B, H, G, N, T, D], of G heads that read one memory.
        key, value: [B, H, N, T, D].
        start: the weights that the memory began with, [H, out, in] each; None: zeros.
        added: what has been added to them, [B, H, out, in] each.
        momentum: the like of `added`; None: there is none, as `rates` says too.
        rates: of the tokens, [B, H, N, T].
        residual: whether M(x) has the term x.
        norm: the layer norm of what the last matrix makes; None: there is none.
        group: inner chunks that the backward pass computes anew at a time.
        pointwise: its functions that are no matrix products, compiled or not.
        passes: what writes and reads a group, and goes back through it.
    Returns: y [B, H, G, N, T, D]; `added` and `momentum` after the last token.
    """
    dtype, heads, tokens = added[0].dtype, query.shape[2], key.shape[-2]
    # the queries of all heads of a memory beside each other [B, H, N, Q, D]
    rows = query.to(dtype).movedim(2, 3).flatten(3, 4).contiguous()
    key, value = key.to(dtype).contiguous(), value.to(dtype).contiguous()
    shares = _shares(rates, heads)
    network = Network(loss, residual, None if norm is None else norm.eps, pointwise)
    weight, reads, carried = None if norm is None else norm.weight, [], momentum or ()
    for of_group in groups((rows, key, value, *shares), group, 2):
        answered, *after = _Group.apply(
            network, passes, len(added), *of_group, weight, *(start or ()), *added, *carried
        )  # fmt: skip
        added, carried = tuple(after[: len(added)]), tuple(after[len(added) :])
        reads.append(answered)
    answered = torch.cat(reads, dim=2) if len(reads) > 1 else reads[0]
    return answered.unflatten(3, (heads, tokens)).movedim(3, 2), added, carried if momentum is not None else None


class _Group(torch.autograd.Function):
    """A group of inner chunks. Its backward pass computes everything but its inputs anew."""

    @staticmethod
    def forward(
        ctx: Any, network: Network, passes: GroupPasses, matrices: int, *given: Tensor | None
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Return y [B, H, N, Q, D], what has been added, and the momentum.

        given: the fields of `Tokens` and `Shares`, the norm's weight, start (if any), added and momentum (if any).
        """
        tokens, shares, weight, start, added, momentum = _parted(given, matrices)
        first = _first(start, added)
        written, last, last_momentum = passes.write(network, tokens, shares, weight, first, momentum)
        made = passes.read(network, tokens.query, shares, written)
        norm = network.norm(weight)
        ctx.network, ctx.passes, ctx.matrices = network, passes, matrices
        # what the norm has read is little beside what a network makes of the tokens: it is kept
        ctx.save_for_backward(*given, None if norm is None else made)
        made = made if norm is None else norm(made)
        # the change of W is added to what has been added: both are small beside W itself
        changed = network.pointwise.changed
        after = [changed(a, f, w) for a, f, w in zip(added, first, last, strict=True)] if start else last
        return tokens.query + made if network.residual else made, *after, *last_momentum

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Gradient, ...]:
        """Return the gradients of what `forward` was given."""
        network, passes, matrices = ctx.network, ctx.passes, ctx.matrices
        *given, answered = ctx.saved_tensors
        tokens, shares, weight, start, added, momentum = _parted(given, matrices)
        written, _, _ = passes.write(network, tokens, shares, weight, _first(start, added), momentum)
        of_read, of_after, of_last_momentum = gradients[0], gradients[1 : 1 + matrices], gradients[1 + matrices :]
        of_read = of_read.contiguous()
        reads = passes.through_reads(network, tokens.query, shares, weight, written, answered, of_read)
        writes = passes.through_writes(
            network, tokens, shares, weight, written, reads.matrices, of_after, of_last_momentum
        )
        of_query = of_read + reads.query if network.residual else reads.query
        of_weight = sum_of_gradients([reads.weight, writes.weight])
        # W as the group starts is start + added; it is subtracted again from W as the group ends
        of_start = (
            [
                network.pointwise.start_gradient(of, of_last)
                for of, of_last in zip(writes.weights, of_after, strict=True)
            ]
            if start
            else []
        )
        of_tokens, of_shares = (of_query, writes.key, writes.value), (*reads.shares, *writes.shares)
        return None, None, None, *of_tokens, *of_shares, of_weight, *of_start, *writes.weights, *writes.momentum


def _first(start: Weights, added: Weights) -> Weights:
    """Return W as a group starts, [B, H, out, in]; start: [H, out, in] each, or nothing; added: [B, H, out, in]."""
    return tuple(map(torch.add, start, added)) if start else added


def _parted(
    given: Sequence[Tensor | None], matrices: int
) -> tuple[Tokens, Shares, Tensor | None, Weights, Weights, Weights]:
    """Return tokens, shares, the norm's weight, start, added and momentum from what `_Group` is given, [...] each."""
    tokens, shares = Tokens(*given[:3]), Shares(*given[3 : 3 + len(Shares._fields)])  # type: ignore[arg-type]
    weight, *rest = given[3 + len(Shares._fields) :]
    with_momentum = shares.momentum is not None
    start, state = rest[: len(rest) - matrices * (1 + with_momentum)], rest[-matrices * (1 + with_momentum) :]
    return tokens, shares, weight, tuple(start), tuple(state[:matrices]), tuple(state[matrices:])  # type: ignore[arg-type]
