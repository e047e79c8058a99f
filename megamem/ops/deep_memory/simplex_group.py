"""A group of Memora's inner chunks, and back through it by hand: writing one after the other, reading all at once.

The equations are those of `simplex.py`, of networks of two matrices. `torch.autograd` would keep what every token has
made in a network several times as wide as its head. Here a group keeps its inputs, and the logarithms it starts from;
its backward pass computes the rest anew. With W and V the first and the last matrix of an inner chunk's start, L and M
the next inner chunk's logarithms, f the product of all decays, a that of the decays after a token, and _x for the
gradient of the loss at x:

    z = k W^T,  h = gelu(z),  r = dl/dy at y = h V^T,  d = (r V) gelu'(z)
    s = ((decay - 1) / c) E^T - d u,    u = (b k / c) W^T,    E = W log W
    L = f log W - d^T (a b k) - s^T a                           s and a, if there are decays; else log W is L before
    M = f log V - (a b r)^T h                                   log V up to a number of each row

    through a softmax    _log W = _x - W / c sum_j _x,  with _x what there is of log W itself and W _W

Letters of shapes: B batch rows, H key/value heads, N inner chunks, T tokens of each, Q queries of each (T times those
that share a head), D width of a head, I inner width of the network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megamem.ops.deep_memory.group_forward import product_into, subtract_product
from megamem.ops.deep_memory.network import Weights
from megamem.ops.deep_memory.simplex import ReadGroup, SimplexNetwork, group_of_rows, row_sum
from megamem.ops.flat_view import flat_view

Gradient = Tensor | None


class Tokens(NamedTuple):
    """Tokens of a group of inner chunks, [B, H, N, T, D] each."""

    key: Tensor
    value: Tensor
    rate: Tensor
    log_decay: Tensor | None
    """None: there are no decays; so with the following."""
    fade: Tensor | None
    """f, the product of an inner chunk's decays, [B, H, N, D]."""
    after: Tensor | None
    """a, that of the decays after each token."""
    weight: Tensor | None
    """That of the norm, [H, D]."""


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


def read_group_by(passes: SimplexPasses) -> ReadGroup:
    """Return `read_group` of `simplex.py` by these passes."""
    return partial(group_of_rows, partial(_Group.apply, passes))


class _Group(torch.autograd.Function):
    """A group of inner chunks. Its backward pass computes everything but its inputs anew."""

    @staticmethod
    def forward(ctx: Any, passes: SimplexPasses, network: SimplexNetwork, *given: Tensor | None) -> tuple[Tensor, ...]:
        """Return y [B, H, N, Q, D] and L after the last inner chunk.

        given: query [B, H, N, Q, D], the fields of `Tokens`, and L of both matrices.
        """
        ctx.passes, ctx.network = passes, network
        ctx.save_for_backward(*given)
        query, tokens, logs = _parted(given)
        written, last = passes.write(network, tokens, logs)
        made = passes.read(network, query, tokens, written).answered
        made = made if network.norm is None else network.norm(made)
        return query + made if network.residual else made, *last

    @staticmethod
    def backward(ctx: Any, of_read: Tensor, *of_last: Tensor) -> tuple[Gradient, ...]:
        """Return the gradients of what `forward` was given, from those of y [B, H, N, Q, D] and of L."""
        passes, network = ctx.passes, ctx.network
        query, tokens, logs = _parted(ctx.saved_tensors)
        written, _ = passes.write(network, tokens, logs)
        answers = passes.read(network, query, tokens, written)
        of_read, of_weight = of_read.contiguous(), None
        out = of_read
        if network.norm is not None:
            out, of_weight = network.pointwise.norm_gradients(of_read, answers.answered, network.norm)
        reads = passes.through_reads(network, query, tokens, written, answers, out.contiguous())
        found = passes.through_writes(network, tokens, written, reads, of_last)
        of_query = of_read + reads.query if network.residual else reads.query
        if of_weight is not None and found.weight is not None:
            of_weight = of_weight + found.weight
        of_tokens = found.key, found.value, found.rate, found.log_decay, found.fade, found.after
        return None, None, of_query, *of_tokens, of_weight, found.up, found.down


def _parted(given: Sequence[Any]) -> tuple[Tensor, Tokens, Weights]:
    """Return queries, the tokens and L from what `_Group` is given, [...] each, in the order of their memory."""
    parts: list[Any] = [None if x is None else x.contiguous() for x in given]
    query, *of_tokens, up, down = parts
    return query, Tokens(*of_tokens), (up, down)


class Written(NamedTuple):
    """What writing the inner chunks of a group has made."""

    up: list[Tensor]
    """log W of each inner chunk [B, H, I, D]; where there are no decays, L."""
    down: list[Tensor]
    """The last matrix's L, [B, H, D, I]."""
    first: list[Tensor]
    """W [B, H, I, D]"""
    last: list[Tensor]
    """V [B, H, D, I]"""
    entropies: list[Tensor]
    """E [B, H, I, D]; empty without decays, as the next two."""
    shift: list[Tensor]
    """s [B, H, T, I]"""
    along: list[Tensor]
    """u [B, H, T, I]"""
    hidden: Tensor
    """z [B, H, N, T, I]"""
    active: Tensor
    """h [B, H, N, T, I]"""
    back: Tensor
    """r V [B, H, N, T, I]"""
    change: Tensor
    """d [B, H, N, T, I]"""
    answered: Tensor
    """What the last matrix makes of the keys, [B, H, N, T, D]."""
    wrong: Tensor
    """r [B, H, N, T, D]"""
    steps: Steps


class Steps(NamedTuple):
    """What tokens contribute, without the weights: [B, H, N, T, D] each."""

    share: Tensor
    """a b, or b without decays."""
    key: Tensor
    """a b k"""
    rated: Tensor | None
    """b k / c; None without decays, as the next one."""
    lost: Tensor | None
    """(decay - 1) / c"""


def _steps(tokens: Tokens, scale: float) -> Steps:
    """Return what tokens contribute; scale: c of the first matrix."""
    if tokens.log_decay is None or tokens.after is None:
        return Steps(tokens.rate, tokens.rate * tokens.key, None, None)
    share, rated = tokens.after * tokens.rate, tokens.rate * tokens.key
    return Steps(share, tokens.after * rated, rated / scale, tokens.log_decay.expm1() / scale)


def write(network: SimplexNetwork, tokens: Tokens, logs: Weights) -> tuple[Written, Weights]:
    """Write inner chunks one after the other.

    logs: L as the first one starts, [B, H, I, D] and [B, H, D, I].
    Returns: what each has made; L after the last one.
    """
    key, pointwise, scales = tokens.key, network.pointwise, [row_sum(x, network.scale) for x in logs]
    steps = _steps(tokens, scales[0])
    hidden, active, back, change = (key.new_empty(*key.shape[:-1], logs[0].shape[-2]) for _ in range(4))
    answered, wrong = torch.empty_like(key), torch.empty_like(key)
    made = Written([], [], [], [], [], [], [], hidden, active, back, change, answered, wrong, steps)
    up, down = logs
    for n in range(key.shape[2]):
        if steps.lost is None:
            exact, first = up, pointwise.simplex(up, scales[0])
        else:
            exact, first, entropies = pointwise.distribution(up, scales[0])
            made.entropies.append(entropies)
        last = pointwise.simplex(down, scales[1])
        for series, x in ((made.up, exact), (made.down, down), (made.first, first), (made.last, last)):
            series.append(x)
        product_into(hidden[:, :, n], key[:, :, n], first.mT)
        torch.ops.aten.gelu.out(hidden[:, :, n], out=active[:, :, n])
        product_into(answered[:, :, n], active[:, :, n], last.mT)
        wrong[:, :, n] = pointwise.output_error(
            answered[:, :, n], key[:, :, n], tokens.value[:, :, n], "l2", network.residual, network.norm
        )
        product_into(back[:, :, n], wrong[:, :, n], last)
        torch.mul(back[:, :, n], pointwise.gelu_slope(hidden[:, :, n]), out=change[:, :, n])
        up, down = _after(tokens, made, n)
    return made, (up, down)


def _after(tokens: Tokens, made: Written, n: int) -> Weights:
    """Return L after inner chunk n, [B, H, I, D] and [B, H, D, I], and keep what shifts its first matrix's rows."""
    steps, change = made.steps, made.change[:, :, n]
    if tokens.fade is None or tokens.after is None or steps.rated is None or steps.lost is None:
        up, down = torch.empty_like(made.up[n]), torch.empty_like(made.down[n])
        subtract_product(made.up[n], change.mT, steps.key[:, :, n], out=up)
        subtract_product(made.down[n], (steps.share * made.wrong)[:, :, n].mT, made.active[:, :, n], out=down)
        return up, down
    along, shift = torch.empty_like(change), torch.empty_like(change)
    product_into(along, steps.rated[:, :, n], made.first[n].mT)
    product_into(shift, steps.lost[:, :, n], made.entropies[n].mT)
    shift.addcmul_(change, along, value=-1)
    made.along.append(along)
    made.shift.append(shift)
    up = tokens.fade[:, :, n, None, :] * made.up[n]
    subtract_product(up, change.mT, steps.key[:, :, n], out=up)
    subtract_product(up, shift.mT, tokens.after[:, :, n], out=up)
    down = tokens.fade[:, :, n, :, None] * made.down[n]
    wrong = steps.share[:, :, n] * made.wrong[:, :, n]
    subtract_product(down, wrong.mT, made.active[:, :, n], out=down)
    return up, down


class Answers(NamedTuple):
    """What queries are answered, and what is made on the way."""

    answered: Tensor
    """What the last matrix makes, before the norm, [B, H, N, Q, D]."""
    by_weights: Tensor
    """The part of it that the weights after the first token make."""
    up: Tensor
    """log W as inner chunks start, or L, [B, H, N, I, D]."""
    down: Tensor
    """[B, H, N, D, I]"""
    first: Tensor
    """W after the first token, [B, H, N, I, D]."""
    last: Tensor
    """V after the first token, [B, H, N, D, I]."""
    hidden: Tensor
    """[B, H, N, Q, I]"""
    active: Tensor
    """[B, H, N, Q, I]"""
    scores: Tensor
    """Of queries with the first matrix's inputs, [B, H, N, Q, T]; and with the last one's, `across`."""
    across: Tensor
    later_key: Tensor
    """Rates times keys of the tokens after the first, [B, H, N, T, D]; and times r."""
    later_wrong: Tensor


def read(network: SimplexNetwork, query: Tensor, tokens: Tokens, written: Written) -> Answers:
    """Return what queries [B, H, N, Q, D] of all inner chunks are answered."""
    pointwise = network.pointwise
    up, down = (torch.stack(x, 2) if len(x) > 1 else x[0][:, :, None] for x in (written.up, written.down))
    fade = _first_decay(tokens)
    key_step, wrong_step = (tokens.rate[..., :1, :] * x[..., :1, :] for x in (tokens.key, written.wrong))
    own_change, own_active = written.change[..., :1, :], written.active[..., :1, :]
    # W and V after the first token, exact
    moved = _minus_outer(up if fade is None else fade[..., None, :] * up, own_change, key_step)
    first = pointwise.simplex(moved, row_sum(up, network.scale))
    moved = _minus_outer(down if fade is None else fade[..., :, None] * down, wrong_step, own_active)
    last = pointwise.simplex(moved, row_sum(down, network.scale))
    later = tokens.rate.clone()
    later[..., 0, :] = 0.0
    later_key, later_wrong = later * tokens.key, later * written.wrong
    scores = _causal(query @ later_key.mT)
    hidden = _minus_product(query @ first.mT, scores, written.change)
    active = F.gelu(hidden)
    across = _causal(active @ written.active.mT)
    by_weights = active @ last.mT
    answered = by_weights - across @ later_wrong
    return Answers(
        answered, by_weights, up, down, first, last, hidden, active, scores, across, later_key, later_wrong
    )  # fmt: skip


def _first_decay(tokens: Tokens) -> Tensor | None:
    """Return the decays of each inner chunk's first token, [B, H, N, D]."""
    return None if tokens.log_decay is None else tokens.log_decay[..., 0, :].exp()


def _minus_outer(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return x - a^T b; x: [..., out, in]; a: [..., 1, out]; b: [..., 1, in]."""
    return torch.addcmul(x, a.mT, b, value=-1)


def _minus_product(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Subtract a b from x, and return it; x: [B, H, N, n, k]; a: [B, H, N, n, m]; b: [B, H, N, m, k]."""
    flat_view(x, 0, 2).baddbmm_(a.flatten(0, 2), b.flatten(0, 2), alpha=-1)
    return x


def _causal(scores: Tensor) -> Tensor:
    """Let no query see later tokens, in place: scores [B, H, N, Q, T], of all heads beside each other."""
    scores.unflatten(-2, (-1, scores.shape[-1])).tril_()
    return scores


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
    """That of log W (or L) as each inner chunk starts, [B, H, N, I, D]."""
    down: Tensor
    """[B, H, N, D, I]"""


def through_reads(
    network: SimplexNetwork, query: Tensor, tokens: Tokens, written: Written, answers: Answers, out: Tensor
) -> ReadGradients:
    """Go back through what queries have read; out: the gradient of `answers.answered`, [B, H, N, Q, D]."""
    pointwise, fade, rate = network.pointwise, _first_decay(tokens), tokens.rate
    own_rate, own_key, own_wrong = (x[..., :1, :] for x in (rate, tokens.key, written.wrong))
    own_change, own_active = written.change[..., :1, :], written.active[..., :1, :]
    # through the last matrix: its steps, then its softmax and the first token's step
    of_across = _causal(-(out @ answers.later_wrong.mT))
    of_active = out @ answers.last
    flat_view(of_active, 0, 2).baddbmm_(of_across.flatten(0, 2), written.active.flatten(0, 2))
    along = (out * answers.by_weights).sum(-2).unsqueeze(-1) / row_sum(answers.down, network.scale)
    of_moved = pointwise.simplex_gradients(out.mT @ answers.active, answers.last, along)
    of_inputs = of_across.mT @ answers.active
    of_inputs[..., :1, :] -= (own_rate * own_wrong) @ of_moved
    of_wrong = -(answers.across.mT @ out)
    of_wrong[..., :1, :] = -(own_active @ of_moved.mT)
    of_decay = None if fade is None else (of_moved * answers.down).sum(-1)
    of_down = of_moved if fade is None else fade[..., :, None] * of_moved
    # through GELU, and the same of the first matrix
    of_hidden = torch.ops.aten.gelu_backward(of_active, answers.hidden)
    of_query = of_hidden @ answers.first
    of_scores = _causal(-(of_hidden @ written.change.mT))
    flat_view(of_query, 0, 2).baddbmm_(of_scores.flatten(0, 2), answers.later_key.flatten(0, 2))
    of_first = of_hidden.mT @ query
    along = (answers.first * of_first).sum(-1, keepdim=True) / row_sum(answers.up, network.scale)
    of_moved = pointwise.simplex_gradients(of_first, answers.first, along)
    of_change = -(answers.scores.mT @ of_hidden)
    of_change[..., :1, :] -= (own_rate * own_key) @ of_moved.mT
    of_key = of_scores.mT @ query
    of_key[..., :1, :] = -(own_change @ of_moved)
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

    reads: what comes from the reads, of which `change`, `active` and `wrong` are added to.
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
        _negative_into(self.of_key_step[:, :, n], change, of_next)
        subtract_product(of_change, steps.key[:, :, n], of_next.mT, out=of_change)
        if self.tokens.after is None or steps.lost is None or steps.rated is None or self.reads.decay is None:
            return None, None
        after, along = self.tokens.after[:, :, n], written.along[n]
        of_shift = -(after @ of_next.mT)
        product_into(self.of_lost[:, :, n], of_shift, written.entropies[n])
        _negative_into(self.of_after[:, :, n], written.shift[n], of_next)
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
        _negative_into(self.of_wrong_step[:, :, n], active, of_next.mT)
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
        flat_view(of_active, 0, 1).baddbmm_(of_answered.flatten(0, 1), last.flatten(0, 1))
        of_hidden.addcmul_(of_active, slope)
        # V is used for y and for r V; its softmax's sums over rows are sums over tokens of what it has made
        of_last = wrong.mT @ of_back
        flat_view(of_last, 0, 1).baddbmm_(of_answered.mT.flatten(0, 1), active.flatten(0, 1))
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
        flat_view(of_key, 0, 1).baddbmm_(of_hidden.flatten(0, 1), first.flatten(0, 1))
        if of_first is None or of_entropies is None or of_fade is None or self.tokens.fade is None:
            of_first = of_hidden.mT @ key
            along = (first * of_first).sum(-1, keepdim=True) / scale
            of_logs = pointwise.simplex_gradients(of_first, first, along).add_(self.reads.up[:, :, n])
            return of_logs.add_(of_next), None
        flat_view(of_first, 0, 1).baddbmm_(of_hidden.mT.flatten(0, 1), key.flatten(0, 1))
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


def _negative_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Write -a b to `out`; out: [B, H, n, k]; a: [B, H, n, m]; b: [B, H, m, k]."""
    nothing = b.new_zeros(())
    torch.baddbmm(nothing, a.flatten(0, 1), b.flatten(0, 1), beta=0, alpha=-1, out=flat_view(out, 0, 1))


TORCH = SimplexPasses(write, read, through_reads, through_writes)
