"""The backward pass of a group of inner chunks of a deep memory, derived by hand: see `group.py`.

Letters of shapes as in `group_forward.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megamem.ops.deep_memory.group_forward import (
    Network,
    Shares,
    Tokens,
    Written,
    product,
    read,
    shares_at,
    write,
)
from megamem.ops.deep_memory.network import Weights
from megamem.ops.deep_memory.products import add_product, negative_product, subtract_product

Gradient = Tensor | None


class Factors(NamedTuple):
    """The factors of a sum of outer products over tokens, which has the shape of a matrix."""

    out: Tensor
    """[..., tokens, out]"""
    inputs: Tensor
    """[..., tokens, in]"""


class ProductGradients(NamedTuple):
    """Gradients of `product`, shapes as there."""

    x: Tensor
    weights: Factors
    """Made where it is added to what comes from later inner chunks, as the momentum's."""
    momentum: Factors | None
    inputs: Tensor
    change: Tensor
    rated: Tensor
    first: Gradient
    carried: Gradient


def product_gradients(
    network: Network, out: Tensor, x: Tensor, shares: Shares, written: Written, i: int, scores: Tensor
) -> ProductGradients:
    """Return the gradients of `product` with matrix i, from that of its result.

    out: [B, H, N, Q, out]; x: [B, H, N, Q, in]; scores: [B, H, N, Q, T], as `product` made them.
    """
    inputs, change = written.inputs[i], written.changes[i]
    of_x, first, carried, momentum = out @ written.weights[i], None, None, None
    if shares.first is not None or shares.carried is not None:
        by_momentum = None if shares.carried is None else out @ written.momentum[i]
        of_x, first, carried = network.pointwise.shared_gradients(x, of_x, shares.first, by_momentum, shares.carried)
    weights = shared_factors(shares.first, out, x)
    momentum = None if shares.carried is None else shared_factors(shares.carried, out, x)
    of_scores = out @ change.mT
    rated = shares.rated * of_scores
    subtract_product(of_x, rated, inputs, out=of_x)
    of_change = negative_product((scores * shares.rated).mT, out)
    return ProductGradients(
        of_x, weights, momentum, negative_product(rated.mT, x), of_change, -(scores * of_scores), first, carried
    )


def shared_factors(share: Tensor | None, out: Tensor, x: Tensor) -> Factors:
    """Return the factors of sum_t share_t out_t x_t^T; share: [..., Q, 1], None for ones; out, x: [..., Q, ...]."""
    if share is None:
        return Factors(out, x)
    # the narrower of the two is the cheaper one to multiply
    return Factors(out, share * x) if x.shape[-1] <= out.shape[-1] else Factors(share * out, x)


class WriteGradients(NamedTuple):
    """Gradients of what `write` was given."""

    weights: Weights
    """Gradients of W as the group starts, [B, H, out, in] each; so with the momentum."""
    momentum: Weights
    key: Tensor
    """[B, H, N, T, D]"""
    value: Tensor
    """[B, H, N, T, D]"""
    shares: tuple[Gradient, ...]
    """Gradients of `step` and those after it in `Shares`."""
    weight: Gradient
    """That of the norm's weight, [H, D]."""


class Reads(NamedTuple):
    """What the reads of one matrix hand on to its writes: gradients that are added there."""

    weights: Factors
    """Gradient of W as each inner chunk starts, [B, H, N, Q, ...]."""
    momentum: Factors | None
    inputs: Tensor
    """[B, H, N, T, in]; may be overwritten, as `change`."""
    change: Tensor
    """[B, H, N, T, out]"""


class ReadGradients(NamedTuple):
    """Gradients of what `read` was given."""

    query: Tensor
    """[B, H, N, Q, D]"""
    shares: tuple[Gradient, ...]
    """Gradients of `rated`, `first` and `carried`."""
    weight: Gradient
    """That of the norm's weight, [H, D]."""
    matrices: tuple[Reads, ...]
    """Those of what has been written."""


def through_reads(
    network: Network, query: Tensor, shares: Shares, weight: Tensor | None, written: Written, answered: Tensor | None,
    out: Tensor,
) -> ReadGradients:  # fmt: skip
    """Go back through what queries have read, through the network and its norm.

    Args:
        query: [B, H, N, Q, D].
        weight: of the norm, [H, D].
        written: what `write` has made.
        answered: what `read` has returned, [B, H, N, Q, D]; None if there is no norm.
        out: the gradient of the network's answers, [B, H, N, Q, D].
    """
    pointwise, norm, of_weight = network.pointwise, network.norm(weight), None
    networks = len(written.weights) == 2
    last_inputs = query
    if networks:
        # what the first matrix has answered, anew
        hidden = product(network, query, shares, written, 0)
        last_inputs, slope = F.gelu(hidden.out), pointwise.gelu_slope(hidden.out)
    if norm is not None and answered is not None:
        out, of_weight = pointwise.norm_gradients(out, answered, norm)
    scores = last_inputs @ written.inputs[-1].mT
    found = [product_gradients(network, out, last_inputs, shares, written, len(written.weights) - 1, scores)]
    if networks:
        of_hidden = found[0].x * slope
        found.insert(0, product_gradients(network, of_hidden, query, shares, written, 0, hidden.scores))
    of_shares = (sum_of_gradients([getattr(each, name) for each in found]) for name in ("rated", "first", "carried"))
    matrices = (Reads(each.weights, each.momentum, each.inputs, each.change) for each in found)
    return ReadGradients(found[0].x, tuple(of_shares), of_weight, tuple(matrices))


def through_writes(
    network: Network, tokens: Tokens, shares: Shares, weight: Tensor | None, written: Written,
    reads: Sequence[Reads], of_weights: Weights, of_momentum: Weights,
) -> WriteGradients:  # fmt: skip
    """Go back through the writing of all inner chunks, the last one first.

    Args:
        weight: of the norm, [H, D].
        written: what `write` has made of the other arguments.
        reads: gradients of what the reads of each matrix were given; those of changes and inputs may be overwritten.
        of_weights, of_momentum: gradients of W and S after the group, [B, H, out, in] each.
    """
    writes = _Writes(network, tokens, shares, weight, written, reads)
    keys, values, weights, of_shares = [], [], [], []
    # what is added to below: the gradients that were given are somebody else's
    of_weights, of_momentum = (
        tuple(x.clone(memory_format=torch.contiguous_format) for x in given) for given in (of_weights, of_momentum)
    )
    for n in reversed(range(tokens.key.shape[2])):
        step, momentum_step, of_inputs, of_changes = writes.subtracted(n, of_weights, of_momentum)
        of_weights, of_momentum, *of_fading = writes.faded(n, of_weights, of_momentum)
        of_key, of_value, of_norm = writes.within(n, of_weights, of_inputs, of_changes)
        keys.append(of_key)
        values.append(of_value)
        weights.append(of_norm)
        of_shares.append([step, *of_fading[:2], momentum_step, of_fading[2]])
    by_share: list[Gradient] = []
    for parts in zip(*of_shares, strict=True):
        kept = [part for part in parts if part is not None]
        by_share.append(torch.stack(kept[::-1], dim=2) if kept else None)
    of_key, of_value = torch.stack(keys[::-1], dim=2), torch.stack(values[::-1], dim=2)
    return WriteGradients(of_weights, of_momentum, of_key, of_value, tuple(by_share), sum_of_gradients(weights))


class _Writes(NamedTuple):
    """What `through_writes` goes back through, inner chunk by inner chunk."""

    network: Network
    tokens: Tokens
    shares: Shares
    weight: Tensor | None
    written: Written
    reads: Sequence[Reads]

    def subtracted(
        self, n: int, of_weights: Weights, of_momentum: Weights
    ) -> tuple[Gradient, Gradient, list[Tensor], list[Tensor]]:
        """Go back through the tokens' steps of inner chunk n.

        of_weights, of_momentum: gradients of W and S after it, [B, H, out, in].
        Returns: gradients of f and p [B, H, T, 1], and of the inputs [B, H, T, in] and changes [B, H, T, out] of both
            matrices, together with those from the reads.
        """
        of_steps: list[Gradient] = []
        of_momentum_steps: list[Gradient] = []
        of_inputs, of_changes = [], []
        shares = shares_at(self.shares, n)
        for i, reads in enumerate(self.reads):
            factors = Factors(self.written.changes[i][:, :, n], self.written.inputs[i][:, :, n])
            of_factors = Factors(reads.change[:, :, n], reads.inputs[:, :, n])
            of_factors, of_step = self._of_outer(of_factors, shares.step, factors, of_weights[i])
            of_steps.append(of_step)
            if shares.momentum_step is not None:
                of_factors, of_step = self._of_outer(of_factors, shares.momentum_step, factors, of_momentum[i])
                of_momentum_steps.append(of_step)
            of_changes.append(of_factors.out)
            of_inputs.append(of_factors.inputs)
        return sum_of_gradients(of_steps), sum_of_gradients(of_momentum_steps), of_inputs, of_changes

    def _of_outer(
        self, of_factors: Factors, share: Tensor, factors: Factors, of_matrix: Tensor
    ) -> tuple[Factors, Tensor]:  # fmt: skip
        """Return the gradients of the factors [B, H, T, ...] and shares [B, H, T, 1] of `subtract_outer`.

        of_factors: what there is of them already; of_matrix: the gradient of the result, [B, H, out, in].
        """
        of_step = self.network.pointwise.step_gradients
        # products with the wider of the two are made as narrow as the other one
        if factors.inputs.shape[-1] <= factors.out.shape[-1]:
            of_inputs, of_share, shared = of_step(of_factors.inputs, share, factors.inputs, factors.out @ of_matrix)
            subtract_product(of_factors.out, shared, of_matrix.mT, out=of_factors.out)
            return Factors(of_factors.out, of_inputs), of_share
        of_out, of_share, shared = of_step(of_factors.out, share, factors.out, factors.inputs @ of_matrix.mT)
        subtract_product(of_factors.inputs, shared, of_matrix, out=of_factors.inputs)
        return Factors(of_out, of_factors.inputs), of_share

    def faded(
        self, n: int, of_weights: Weights, of_momentum: Weights
    ) -> tuple[Weights, Weights, Gradient, Gradient, Gradient]:
        """Go back through what inner chunk n keeps of W and S.

        of_weights, of_momentum: as in `subtracted`.
        Returns: gradients of W and S as it starts, but for what `within` adds; of c, m and e [B, H, 1, 1].
        """
        shares, written = shares_at(self.shares, n), self.written
        weights, momenta, others = list(of_weights), list(of_momentum), []
        for i, reads in enumerate(self.reads):
            if shares.lost is not None or momenta:
                momentum = (of_momentum[i], written.momentum[i][:, :, n]) if momenta else (None, None)
                weights[i], of_carried, *rest = self.network.pointwise.faded_gradients(
                    of_weights[i], momentum[0], written.weights[i][:, :, n], momentum[1],
                    shares.lost, shares.last_carried, shares.momentum,
                )  # fmt: skip
                others.append(rest)
                if reads.momentum is not None:
                    momenta[i] = _add_outer(of_carried, reads.momentum, n)
            _add_outer(weights[i], reads.weights, n)
        if not others:
            return tuple(weights), (), None, None, None
        of_lost, of_last_carried, of_kept = (sum_of_gradients(parts) for parts in zip(*others, strict=True))
        return tuple(weights), tuple(momenta), of_lost, of_last_carried, of_kept

    def within(
        self, n: int, of_weights: Weights, of_inputs: list[Tensor], of_changes: list[Tensor]
    ) -> tuple[Tensor, Tensor, Gradient]:
        """Go back from the inputs and changes of both matrices to the tokens of inner chunk n.

        of_weights: gradients of W as it starts [B, H, out, in], to which what comes by this way is added; of_inputs,
        of_changes: as `subtracted` returns them.
        Returns: gradients of the keys and values, [B, H, T, D], and of the norm's weight, [H, D].
        """
        written, network, pointwise = self.written, self.network, self.network.pointwise
        key, value = self.tokens.key[:, :, n], self.tokens.value[:, :, n]
        wrong, inputs, last = (x[-1][:, :, n] for x in (written.changes, written.inputs, written.weights))
        of_wrong, of_active, of_hidden, slope = of_changes[-1], of_inputs[-1], None, None
        if written.hidden is not None and written.back is not None:
            # d = (W1^T r) s'(z)
            of_back, of_hidden, slope = pointwise.hidden_gradients(
                of_changes[0], written.hidden[:, :, n], written.back[:, :, n]
            )
            of_wrong = add_product(of_wrong, of_back, last.mT)
            add_product(of_weights[-1], wrong.mT, of_back)
        of_answered, of_key, of_value, of_norm = pointwise.error_gradients(
            of_wrong, written.answered[:, :, n], key, value, network.loss, network.residual, network.norm(self.weight)
        )
        if of_answered is not None:
            of_active = add_product(of_active, of_answered, last)
            add_product(of_weights[-1], of_answered.mT, inputs)
        keys = of_active
        if of_hidden is not None and slope is not None:
            of_hidden.addcmul_(of_active, slope)
            keys = add_product(of_inputs[0], of_hidden, written.weights[0][:, :, n])
            add_product(of_weights[0], of_hidden.mT, key)
        return keys if of_key is None else keys + of_key, of_value, of_norm


def _add_outer(x: Tensor, factors: Factors, n: int) -> Tensor:
    """Add the sum of outer products of inner chunk n to x [B, H, out, in], and return it."""
    return add_product(x, factors.out[:, :, n].mT, factors.inputs[:, :, n])


def sum_of_gradients(parts: Sequence[Gradient]) -> Gradient:
    """Return the sum of gradients, all of one shape [...]; None stands for zeros."""
    found = [part for part in parts if part is not None]
    return sum(found[1:], found[0]) if found else None


class GroupPasses(NamedTuple):
    """Both passes of a group of inner chunks: by torch, or by kernels."""

    write: Callable[..., tuple[Written, Weights, Weights]]
    """See `write` of `group_forward.py`."""
    read: Callable[..., Tensor]
    """See `read` of `group_forward.py`."""
    through_reads: Callable[..., ReadGradients]
    """See `through_reads`."""
    through_writes: Callable[..., WriteGradients]
    """See `through_writes`."""


TORCH = GroupPasses(write, read, through_reads, through_writes)
