"""The backward pass of a group of inner chunks of a deep memory, derived by hand: see `group.py`.

Letters of shapes as in `group_forward.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megamem.ops.deep_memory.error import error_gradients, norm_gradients
from megamem.ops.deep_memory.group_forward import Network, Shares, Tokens, Written, product, shares_at, side_by_side
from megamem.ops.deep_memory.network import gelu

Gradient = Tensor | None


class ProductGradients(NamedTuple):
    """Gradients of `product`, shapes as there."""

    x: Tensor
    weights: Tensor
    momentum: Gradient
    inputs: Tensor
    change: Tensor
    rated: Tensor
    first: Gradient
    carried: Gradient


def product_gradients(out: Tensor, x: Tensor, shares: Shares, written: Written, i: int) -> ProductGradients:
    """Return the gradients of `product` from that of its result, `out` [B, H, N, Q, out]; x [B, H, N, Q, in]."""
    inputs, change = written.inputs[i], written.changes[i]
    of_x = out @ written.weights[i]
    weighted, first, momentum, carried = out, None, None, None
    if shares.first is not None:
        first = (x * of_x).sum(-1, keepdim=True)
        weighted, of_x = shares.first * out, shares.first * of_x
    if shares.carried is not None:
        of_momentum = out @ written.momentum[i]
        carried = (x * of_momentum).sum(-1, keepdim=True)
        of_x = of_x + shares.carried * of_momentum
        momentum = (shares.carried * out).mT @ x
    scores, of_scores = x @ inputs.mT, out @ change.mT
    rated = shares.rated * of_scores
    return ProductGradients(
        of_x - rated @ inputs, weighted.mT @ x, momentum, -(rated.mT @ x), -((scores * shares.rated).mT @ out),
        -(scores * of_scores), first, carried,
    )  # fmt: skip


class Backward:
    """Gradients of what a group of inner chunks was given, from those of what it has returned."""

    def __init__(
        self, network: Network, tokens: Tokens, shares: Shares, weight: Tensor | None, written: list[Written]
    ) -> None:
        """Begin; `through_reads`, then `through_writes` go on.

        weight: of the norm, [H, D]; written: what writing each inner chunk has made.
        """
        self._network, self._given, self._shares, self._weight, self._written = network, tokens, shares, weight, written
        self.tokens: list[Tensor] = []
        """Of the queries, keys and values, as in `Tokens`."""
        self.shares: list[Gradient] = []
        """As in `Shares`."""
        self.weight: Gradient = None
        """Of the norm's weight, [H, D]."""
        self.start: list[Tensor] = []
        """Of the weights that the memory began with, [H, out, in]."""
        self._reads: list[ProductGradients] = []

    def through_reads(self, out: Tensor) -> None:
        """Go back through what queries have read. out: the gradient of the answers, [B, H, N, Q, D]."""
        query, norm, written = self._given.query, self._network.norm(self._weight), side_by_side(self._written)
        of_query = out if self._network.residual else None
        networks = len(written.weights) == 2
        if networks:
            answered = product(query, self._shares, written, 0)
            active, slope, _ = gelu(answered)
        last_inputs = active if networks else query
        if norm is not None:
            out, self.weight = norm_gradients(out, product(last_inputs, self._shares, written, networks), norm)
        self._reads = [product_gradients(out, last_inputs, self._shares, written, networks)]
        if networks:
            self._reads.insert(0, product_gradients(self._reads[0].x * slope, query, self._shares, written, 0))
        of_read = self._reads[0].x
        self.tokens = [of_read if of_query is None else of_query + of_read]
        self.shares = [_sum([part.rated for part in self._reads])]
        self.shares += [_sum([part.first for part in self._reads]), _sum([part.carried for part in self._reads])]

    def through_writes(self, of_added: list[Tensor], of_momentum: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Go back through the writing of all inner chunks, the last one first.

        of_added, of_momentum: gradients of what has been added, and of the momentum, after the group, [B, H, out, in].
        Returns: the same as the group starts.
        """
        keys, values, of_shares = [], [], []
        start = [torch.zeros_like(x) for x in of_added]
        for n in reversed(range(len(self._written))):
            of_weights, of_carried, of_inputs, of_changes, by_shares = self._after(n, of_added, of_momentum)
            of_weights, of_key, of_value = self._within(n, of_weights, of_inputs, of_changes)
            for total, part in zip(start, of_weights, strict=True):
                total += part
            of_added = [a + b for a, b in zip(of_added, of_weights, strict=True)]
            of_momentum = of_carried
            keys.append(of_key)
            values.append(of_value)
            of_shares.append(by_shares)
        self.tokens += [torch.stack(keys[::-1], dim=2), torch.stack(values[::-1], dim=2)]
        for parts in zip(*of_shares, strict=True):
            kept = [part for part in parts if part is not None]
            self.shares.append(torch.stack(kept[::-1], dim=2) if kept else None)
        self.start = [part.sum(0) for part in start]
        return of_added, of_momentum

    def _after(
        self, n: int, of_added: list[Tensor], of_momentum: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Gradient]]:
        """Go back through `_after` of inner chunk n.

        Args:
            of_added, of_momentum: gradients of W' and S', [B, H, out, in].
        Returns: gradients of W (but for what is added) and S, of the inputs [B, H, T, in] and changes [B, H, T, out]
            of both matrices, together with those from the reads, and of the shares from `step` on.
        """
        shares, written = shares_at(self._shares, n), self._written[n]
        of_weights, of_carried, of_inputs, of_changes = [], [], [], []
        step, lost, last_carried, momentum_step, momentum = [], [], [], [], []
        for i, (change, inputs) in enumerate(zip(written.changes, written.inputs, strict=True)):
            reads = self._reads[i]
            slope = inputs @ of_added[i].mT
            step.append(-(change * slope).sum(-1, keepdim=True))
            of_change = reads.change[:, :, n] - shares.step * slope
            of_input = reads.inputs[:, :, n] - (shares.step * change) @ of_added[i]
            of_weight = reads.weights[:, :, n]
            if shares.lost is not None:
                lost.append((of_added[i] * written.weights[i]).sum((-2, -1), keepdim=True))
                of_weight = of_weight + shares.lost * of_added[i]
            if shares.momentum is not None:
                assert shares.momentum_step is not None
                assert shares.last_carried is not None
                assert reads.momentum is not None
                carried = written.momentum[i]
                slope = inputs @ of_momentum[i].mT
                momentum_step.append(-(change * slope).sum(-1, keepdim=True))
                of_change = of_change - shares.momentum_step * slope
                of_input = of_input - (shares.momentum_step * change) @ of_momentum[i]
                last_carried.append((of_added[i] * carried).sum((-2, -1), keepdim=True))
                momentum.append((of_momentum[i] * carried).sum((-2, -1), keepdim=True))
                of_carried.append(
                    reads.momentum[:, :, n] + shares.last_carried * of_added[i] + shares.momentum * of_momentum[i]
                )
            of_weights.append(of_weight)
            of_inputs.append(of_input)
            of_changes.append(of_change)
        by_shares = [_sum(parts) for parts in (step, lost, last_carried, momentum_step, momentum)]
        return of_weights, of_carried, of_inputs, of_changes, by_shares

    def _within(
        self, n: int, of_weights: list[Tensor], of_inputs: list[Tensor], of_changes: list[Tensor]
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        """Go back from the inputs and changes of both matrices to the tokens of inner chunk n.

        of_weights, of_inputs, of_changes: as `_after` returns them. Returns: of_weights with what comes by this way;
        gradients of the keys and values, [B, H, T, D].
        """
        written, norm = self._written[n], self._network.norm(self._weight)
        key, value, last = self._given.key[:, :, n], self._given.value[:, :, n], written.weights[-1]
        of_wrong, of_active, of_hidden = of_changes[-1], of_inputs[-1], None
        if written.hidden is not None and written.active is not None and written.back is not None:
            # d = (W1^T r) s'(z)
            of_back = of_changes[0] * written.active.slope
            of_hidden = of_changes[0] * written.back * written.active.curve(written.hidden)
            of_wrong = of_wrong + of_back @ last.mT
            of_weights[-1] = of_weights[-1] + written.changes[-1].mT @ of_back
        of_answered, of_key, of_value, of_norm = error_gradients(
            of_wrong, written.answered, key, value, self._network.loss, self._network.residual, norm
        )
        self.weight = _sum([self.weight, of_norm])
        if of_answered is not None:
            of_active = of_active + of_answered @ last
            of_weights[-1] = of_weights[-1] + of_answered.mT @ written.inputs[-1]
        if of_hidden is None or written.active is None:
            keys = of_active
        else:
            of_hidden = of_hidden + of_active * written.active.slope
            keys = of_inputs[0] + of_hidden @ written.weights[0]
            of_weights[0] = of_weights[0] + of_hidden.mT @ key
        return of_weights, keys if of_key is None else keys + of_key, of_value


def _sum(parts: Sequence[Gradient]) -> Gradient:
    """Return the sum of gradients, all of one shape [...]; None stands for zeros."""
    found = [part for part in parts if part is not None]
    return sum(found[1:], found[0]) if found else None
