"""The backward pass of a group of Memora's inner chunks, by hand: through all reads at once, and writes from the last.

The equations are those of `simplex.py` and `simplex_group.py`.
Letters of shapes: B batch rows, H key/value heads, N inner chunks, T tokens of each, Q queries of each (T times those
that share a head), D width of a head, I inner width of the network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megamem.ops.deep_memory.network import Weights
from megamem.ops.deep_memory.products import (
    add_product,
    negative_product,
    negative_product_into,
    product_into,
    subtract_product,
)
from megamem.ops.deep_memory.simplex import SimplexNetwork, row_sum
from megamem.ops.deep_memory.simplex_group_forward import Answers, Tokens, Written, causal, first_decay, read, write

Gradient = Tensor | None


class ReadGradients(NamedTuple):
    """What goes back through the reads; letters of shapes as in the file's description."""

    query: Tensor
    """[B, H, N, Q, D]"""
    key: Tensor
    """[B, H, N, T, D], as the next two."""
    wrong: Tensor
    """That of r."""
    rate: Tensor
    decay: Tensor | None
    """That of the first token's log_decay, [B, H, N, D]."""
    change: Tensor
    """That of d, [B, H, N, T, I]."""
    active: Tensor
    """That of h, [B, H, N, T, I]."""
    up: Tensor
    """That of log W, or of L, as each inner chunk starts [B, H, N, I, D]: what `through_writes` beside it takes."""
    down: Tensor
    """[B, H, N, D, I]"""


def through_reads(
    network: SimplexNetwork, query: Tensor, tokens: Tokens, written: Written, answers: Answers, out: Tensor
) -> ReadGradients:
    """Go back through what queries have read; out: the gradient of `answers.answered`, [B, H, N, Q, D]."""
    pointwise, fade, rate = network.pointwise, first_decay(tokens), tokens.rate
    own_rate, own_key, own_wrong = (x[..., :1, :] for x in (rate, tokens.key, written.wrong))
    own_change, own_active = written.change[..., :1, :], written.active[..., :1, :]
    # through the last matrix: its steps, then its softmax and the first token's step
    of_across = causal(negative_product(out, answers.later_wrong.mT))
    of_active = out @ answers.last
    add_product(of_active, of_across, written.active)
    along = (out * answers.by_weights).sum(-2).unsqueeze(-1) / row_sum(answers.down, network.scale)
    of_moved = pointwise.simplex_gradients(out.mT @ answers.active, answers.last, along)
    of_inputs = of_across.mT @ answers.active
    of_inputs[..., :1, :] -= (own_rate * own_wrong) @ of_moved
    of_wrong = negative_product(answers.across.mT, out)
    of_wrong[..., :1, :] = negative_product(own_active, of_moved.mT)
    of_decay = None if fade is None else (of_moved * answers.down).sum(-1)
    of_down = of_moved if fade is None else fade[..., :, None] * of_moved
    # through GELU, and the same of the first matrix
    of_hidden = torch.ops.aten.gelu_backward(of_active, answers.hidden)
    of_query = of_hidden @ answers.first
    of_scores = causal(negative_product(of_hidden, written.change.mT))
    add_product(of_query, of_scores, answers.later_key)
    of_first = of_hidden.mT @ query
    along = (answers.first * of_first).sum(-1, keepdim=True) / row_sum(answers.up, network.scale)
    of_moved = pointwise.simplex_gradients(of_first, answers.first, along)
    of_change = negative_product(answers.scores.mT, of_hidden)
    of_change[..., :1, :] -= (own_rate * own_key) @ of_moved.mT
    of_key = of_scores.mT @ query
    of_key[..., :1, :] = negative_product(own_change, of_moved)
    of_up = of_moved
    if fade is not None and of_decay is not None:
        of_decay = fade * (of_decay + (of_moved * answers.up).sum(-2))
        of_up = fade[..., None, :] * of_moved
    of_rate = torch.addcmul(of_key * tokens.key, of_wrong, written.wrong)
    return ReadGradients(
        of_query, rate * of_key, rate * of_wrong, of_rate, of_decay, of_change, of_inputs, of_up, of_down
    )  # fmt: skip


class WriteGradients(NamedTuple):
    """Gradients of what `write` was given, through it and through what the reads take of the tokens."""

    up: Tensor
    """That of L as the group starts, [B, H, I, D]."""
    down: Tensor
    """[B, H, D, I]"""
    key: Tensor
    """[B, H, N, T, D], as the following."""
    value: Tensor
    rate: Tensor
    log_decay: Gradient
    fade: Gradient
    """[B, H, N, D]"""
    after: Gradient
    weight: Gradient
    """That of the norm, [H, D]."""


def through_writes(
    network: SimplexNetwork, tokens: Tokens, written: Written, reads: ReadGradients, of_last: Sequence[Tensor]
) -> WriteGradients:
    """Go back through the writing of all inner chunks, the last one first.

    reads: what comes from the reads; `change` and `active` are added to.
    of_last: gradients of L after the group, [B, H, I, D] and [B, H, D, I].
    """
    writes = _Writes(network, tokens, written, reads, *(torch.empty_like(tokens.key) for _ in range(7)))
    up, down = (x.contiguous() for x in of_last)
    of_weights, of_fades = [], []
    for n in reversed(range(tokens.key.shape[2])):
        of_first, of_entropies = writes.through_first(n, up)
        of_hidden, of_norm, next_down, of_fade = writes.through_last(n, down)
        up, of_fade = writes.through_weights(n, up, of_first, of_entropies, of_hidden, of_fade)
        down = next_down
        of_weights.append(of_norm)
        of_fades.append(of_fade)
    return writes.found(up, down, of_weights, of_fades[::-1])


class _Writes(NamedTuple):
    """What `through_writes` goes back through, inner chunk by inner chunk, and gradients [B, H, N, T, D] it fills."""

    network: SimplexNetwork
    tokens: Tokens
    written: Written
    reads: ReadGradients
    of_key: Tensor
    of_value: Tensor
    of_key_step: Tensor
    """That of a b k."""
    of_wrong_step: Tensor
    """That of a b r."""
    of_rated: Tensor
    """That of b k / c."""
    of_lost: Tensor
    """That of (decay - 1) / c."""
    of_after: Tensor
    """That of a, through the shifts of rows."""

    def through_first(self, n: int, of_next: Tensor) -> tuple[Gradient, Gradient]:
        """Go back through the steps of the first matrix's logarithms in inner chunk n.

        of_next: the gradient of L after it, [B, H, I, D].
        Returns: gradients of W and E through the shifts of rows, [B, H, I, D]; None where there are no decays.
        """
        written, steps = self.written, self.written.steps
        change, of_change = written.change[:, :, n], self.reads.change[:, :, n]
        negative_product_into(self.of_key_step[:, :, n], change, of_next)
        subtract_product(of_change, steps.key[:, :, n], of_next.mT, out=of_change)
        if self.tokens.after is None or steps.lost is None or steps.rated is None or self.reads.decay is None:
            return None, None
        after, along = self.tokens.after[:, :, n], written.along[n]
        of_shift = negative_product(after, of_next.mT)
        product_into(self.of_lost[:, :, n], of_shift, written.entropies[n])
        negative_product_into(self.of_after[:, :, n], written.shift[n], of_next)
        of_change.addcmul_(of_shift, along, value=-1)
        of_along = -(of_shift * change)
        product_into(self.of_rated[:, :, n], of_along, written.first[n])
        return of_along.mT @ steps.rated[:, :, n], of_shift.mT @ steps.lost[:, :, n]

    def through_last(self, n: int, of_next: Tensor) -> tuple[Tensor, Gradient, Tensor, Gradient]:
        """Go back through the step of the last matrix's logarithms, and through d and r to z.

        of_next: the gradient of L after it, [B, H, D, I].
        Returns: gradients of z [B, H, T, I], of the norm's weight [H, D], of L before it, and of the decays [B, H, D].
        """
        written, tokens, network, pointwise = self.written, self.tokens, self.network, self.network.pointwise
        share, wrong, last = written.steps.share[:, :, n], written.wrong[:, :, n], written.last[n]
        active, of_active = written.active[:, :, n], self.reads.active[:, :, n]
        negative_product_into(self.of_wrong_step[:, :, n], active, of_next.mT)
        subtract_product(of_active, share * wrong, of_next, out=of_active)
        of_back, of_hidden, slope = pointwise.hidden_gradients(
            self.reads.change[:, :, n], written.hidden[:, :, n], written.back[:, :, n]
        )
        by_back = of_back @ last.mT
        of_wrong = torch.addcmul(self.reads.wrong[:, :, n] + by_back, share, self.of_wrong_step[:, :, n])
        answered = written.answered[:, :, n]
        of_answered, of_key, of_value, of_norm = pointwise.error_gradients(
            of_wrong, answered, tokens.key[:, :, n], tokens.value[:, :, n], "l2", network.residual, network.norm
        )
        self.of_value[:, :, n] = of_value
        self.of_key[:, :, n] = self.reads.key[:, :, n] if of_key is None else self.reads.key[:, :, n] + of_key
        add_product(of_active, of_answered, last)
        of_hidden.addcmul_(of_active, slope)
        # V is used for y and for r V; its softmax's sums over rows are sums over tokens of what it has made
        of_last = wrong.mT @ of_back
        add_product(of_last, of_answered.mT, active)
        along = torch.addcmul(wrong * by_back, of_answered, answered).sum(-2).unsqueeze(-1)
        of_logs = pointwise.simplex_gradients(of_last, last, along / row_sum(last, network.scale))
        of_logs += self.reads.down[:, :, n]
        if tokens.fade is None:
            return of_hidden, of_norm, of_logs + of_next, None
        of_fade = (of_next * written.down[n]).sum(-1)
        return of_hidden, of_norm, of_logs.addcmul_(tokens.fade[:, :, n, :, None], of_next), of_fade

    def through_weights(
        self, n: int, of_next: Tensor, of_first: Gradient, of_entropies: Gradient, of_hidden: Tensor, of_fade: Gradient
    ) -> tuple[Tensor, Gradient]:
        """Go back from z to the keys and the first matrix's logarithms as inner chunk n starts.

        Args:
            of_next: the gradient of L after it, [B, H, I, D].
            of_first, of_entropies: as `through_first` returns them.
            of_hidden, of_fade: as `through_last` returns them.
        Returns: the gradients of L before it, and of the decays [B, H, D].
        """
        written, first, pointwise = self.written, self.written.first[n], self.network.pointwise
        of_key, key, scale = self.of_key[:, :, n], self.tokens.key[:, :, n], row_sum(first, self.network.scale)
        add_product(of_key, of_hidden, first)
        if of_first is None or of_entropies is None or of_fade is None or self.tokens.fade is None:
            of_first = of_hidden.mT @ key
            along = (first * of_first).sum(-1, keepdim=True) / scale
            of_logs = pointwise.simplex_gradients(of_first, first, along).add_(self.reads.up[:, :, n])
            return of_logs.add_(of_next), None
        add_product(of_first, of_hidden.mT, key)
        of_logs, of_first_fade = pointwise.distribution_gradients(
            of_first, of_entropies, written.up[n], first, self.reads.up[:, :, n], of_next,
            self.tokens.fade[:, :, n, None, :], scale,
        )  # fmt: skip
        return of_logs, of_fade + of_first_fade

    def found(
        self, up: Tensor, down: Tensor, of_weights: Sequence[Gradient], of_fades: Sequence[Gradient]
    ) -> WriteGradients:
        """Return all gradients, given those of L as the group starts and, by inner chunk, of the norm's weight and f.

        up: [B, H, I, D]; down: [B, H, D, I].
        """
        tokens, written, reads, steps = self.tokens, self.written, self.reads, self.written.steps
        by_key, by_wrong = tokens.key * self.of_key_step, written.wrong * self.of_wrong_step
        of_key = self.of_key.addcmul_(steps.share, self.of_key_step)
        both = by_key + by_wrong
        norms = [x for x in of_weights if x is not None]
        of_weight = sum(norms[1:], norms[0]) if norms else None
        fades = [x for x in of_fades if x is not None]
        if tokens.after is None or tokens.log_decay is None or reads.decay is None:
            return WriteGradients(up, down, of_key, self.of_value, reads.rate + both, None, None, None, of_weight)
        scale = row_sum(up, self.network.scale)
        of_rate = torch.addcmul(reads.rate, tokens.after, both)
        of_rate.addcmul_(tokens.key, self.of_rated, value=1 / scale)
        of_key.addcmul_(tokens.rate, self.of_rated, value=1 / scale)
        of_after = self.of_after.addcmul_(tokens.rate, both)
        of_decay = self.of_lost * tokens.log_decay.exp() / scale
        of_decay[..., 0, :] += reads.decay
        return WriteGradients(
            up, down, of_key, self.of_value, of_rate, of_decay, torch.stack(fades, 2), of_after, of_weight
        )  # fmt: skip


class SimplexPasses(NamedTuple):
    """Both passes of a group of inner chunks: by torch, or by kernels."""

    write: Callable[..., tuple[Any, Weights]]
    """See `write`."""
    read: Callable[..., Any]
    """See `read`; what it returns has `answered` [B, H, N, Q, D]."""
    through_reads: Callable[..., Any]
    """See `through_reads`; what it returns has `query` [B, H, N, Q, D]."""
    through_writes: Callable[..., Any]
    """See `through_writes`; what it returns has the fields of `WriteGradients`."""


TORCH = SimplexPasses(write, read, through_reads, through_writes)
