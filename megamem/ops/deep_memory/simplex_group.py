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

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megamem.ops.deep_memory.network import Weights
from megamem.ops.deep_memory.simplex import ReadGroup, SimplexNetwork, group_of_rows
from megamem.ops.deep_memory.simplex_group_backward import Gradient, SimplexPasses
from megamem.ops.deep_memory.simplex_group_forward import Tokens


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
