"""What kept networks answer together: each one's own answer, weighed by the query's shares.

With U_n and V_n the matrices of network n, s = GELU and LN a layer norm without a weight, which may be left out,

    y_t = sum_n w[t, n] LN(V_n^T s(U_n q_t))            of networks of two matrices; of single ones LN(U_n q_t)

A hidden layer is several times as wide as a query, and each pair of query and network has one. So none is kept:
the networks are taken one after the other, and the backward pass, which is derived by hand, computes each anew. With _x
for the gradient of the loss at x, h = s(U q) and m = V^T h

    _w = _y . LN(m),   _m = the norm's backward of w _y,   _V = sum_t h _m^T,   _z = (V _m) s'(z),   _U = sum_t _z q^T

Letters of shapes: B batch rows, H key/value heads, G query heads that share one of them, T tokens, R = T G rows of
queries, N kept networks, D width of a head, I inner width, V width of an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megamem.ops.deep_memory.pointwise import PLAIN, Pointwise
from megamem.ops.deep_memory.products import product_into

PROGRAM_ROWS = {2: 128, 4: 64, 8: 64}
"""Rows of queries that a program of the kernels answers, by the bytes of a number: more do not fit on an H100."""
Spans = Sequence[tuple[int, int]]
"""For each of some memories the first token that reads it, and the first one after it that does not."""


class KeptPasses(NamedTuple):
    """Both passes of kept networks: by torch, or by kernels."""

    answer: Callable[..., Tensor]
    """See `answer`."""
    gradients: Callable[..., tuple[Tensor, Tensor, list[Tensor]]]
    """See `gradients`."""


class _KeptNetworks(torch.autograd.Function):
    """The sum over networks; its backward pass computes everything but the inputs anew."""

    @staticmethod
    def forward(
        ctx: Any, passes: KeptPasses, rows: Tensor, shares: Tensor, eps: float | None, reading: list[slice],
        pointwise: Pointwise, *matrices: Tensor,
    ) -> Tensor:  # fmt: skip
        """Return y [B, H, R, V]; arguments as in `answer`."""
        ctx.passes, ctx.eps, ctx.reading, ctx.pointwise = passes, eps, reading, pointwise
        ctx.save_for_backward(rows, shares, *matrices)
        return passes.answer(rows, shares, eps, reading, pointwise, matrices)

    @staticmethod
    def backward(ctx: Any, of_total: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of rows, shares and matrices, from that of y [B, H, R, V]."""
        rows, shares, *matrices = ctx.saved_tensors
        of_rows, of_shares, of_matrices = ctx.passes.gradients(
            of_total, rows, shares, ctx.eps, ctx.reading, ctx.pointwise, matrices
        )
        return None, of_rows.to(rows.dtype), of_shares, None, None, None, *of_matrices


def answer(
    rows: Tensor, shares: Tensor, eps: float | None, reading: Sequence[slice], pointwise: Pointwise,
    matrices: Sequence[Tensor],
) -> Tensor:  # fmt: skip
    """Return y [B, H, R, V].

    Args:
        rows: [B, H, R, D].
        shares: [B, H, R, N].
        reading: the rows that read each network.
        eps, pointwise, matrices: as in `kept_networks`.
    """
    total = shares.new_zeros(*rows.shape[:3], matrices[-1].shape[-1 if len(matrices) == 2 else -2])
    for n, here in enumerate(reading):
        own = rows[:, :, here]
        if own.numel():
            made = _made(own, _network(matrices, n, rows.dtype))
            total[:, :, here].add_(pointwise.weighed(made.last, shares[:, :, here, n : n + 1], eps))
    return total


def gradients(
    of_total: Tensor, rows: Tensor, shares: Tensor, eps: float | None, reading: Sequence[slice], pointwise: Pointwise,
    matrices: Sequence[Tensor],
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """Return the gradients of rows, shares and matrices; that of rows may have the dtype of the shares.

    of_total: that of y [B, H, R, V]; the rest as in `answer`.
    """
    # summed over networks, so in the dtype of the shares
    of_shares, of_rows = torch.zeros_like(shares), torch.zeros_like(rows, dtype=shares.dtype)
    of_matrices = [matrix.new_empty(matrix.shape) for matrix in matrices]
    for n, here in enumerate(reading):
        if not rows[:, :, here].numel():  # nobody reads it
            for whole in of_matrices:
                whole[:, :, n] = 0.0
            continue
        own = _network(matrices, n, rows.dtype)
        made, share = _made(rows[:, :, here], own), shares[:, :, here, n : n + 1]
        of_last, of_share = pointwise.weighed_gradients(of_total[:, :, here], made.last, share, eps)
        of_shares[:, :, here, n : n + 1] = of_share
        of_rows[:, :, here].add_(_gradients(of_last, rows[:, :, here], own, made, [x[:, :, n] for x in of_matrices]))
    return of_rows, of_shares, of_matrices


TORCH = KeptPasses(answer, gradients)


def kept_networks(
    query: Tensor, matrices: Sequence[Tensor], shares: Tensor, eps: float | None, spans: Spans = (),
    pointwise: Pointwise = PLAIN, passes: KeptPasses = TORCH,
) -> Tensor:  # fmt: skip
    """Return the sum of what kept networks answer, times their shares.

    Args:
        query: [B, H, G, T, D], in the dtype of the products.
        matrices: U [B, H, N, I, D] and V [B, H, N, I, V]; or U [B, H, N, V, D] alone.
        shares: w [B, H, G, T, N], whose dtype the answer has.
        eps: the number added to the layer norm's variance; None: there is no norm.
        spans: the first token that reads each network, and the first one after it that does not; if not given, all
            tokens read all of them.
        pointwise: its functions that are no matrix products, compiled or not.
        passes: what computes it, and goes back through it.
    Returns: y [B, H, G, T, V].
    """
    groups = query.shape[2]
    # tokens first, so that those from a certain one on stand together: [B, H, R, ...]
    rows, shares = (x.movedim(2, 3).flatten(2, 3) for x in (query, shares))
    reading = [slice(begin * groups, end * groups) for begin, end in spans] or [slice(None)] * shares.shape[-1]
    made: Tensor = _KeptNetworks.apply(passes, rows, shares, eps, reading, pointwise, *matrices)
    return made.unflatten(2, (-1, groups)).movedim(3, 2)


def _network(matrices: Sequence[Tensor], n: int, dtype: torch.dtype) -> list[Tensor]:
    """Return the matrices [B, H, ...] of network n among [B, H, N, ...], in the dtype of the products."""
    return [matrix[:, :, n].to(dtype) for matrix in matrices]


class _Made(NamedTuple):
    """What one network makes of the rows that read it."""

    hidden: Tensor | None
    """z = U q [B, H, R, I]; None of a single matrix."""
    active: Tensor
    """What the last matrix reads, [B, H, R, I], or the rows themselves."""
    last: Tensor
    """What it makes, m [B, H, R, V]."""


def _made(rows: Tensor, matrices: Sequence[Tensor]) -> _Made:
    """Return what a network makes of rows [B, H, R, D]; matrices: its own, [B, H, I, D] and [B, H, I, V]."""
    hidden = rows @ matrices[0].mT
    if len(matrices) == 1:
        return _Made(None, rows, hidden)
    active = F.gelu(hidden)
    return _Made(hidden, active, active @ matrices[1])


def _gradients(
    of_last: Tensor, rows: Tensor, matrices: Sequence[Tensor], made: _Made, out: Sequence[Tensor]
) -> Tensor:  # fmt: skip
    """Return the gradient of the rows of one network, and write those of its matrices to `out`.

    of_last: that of m [B, H, R, V]; rows: [B, H, R, D]; matrices and out: [B, H, I, D] and [B, H, I, V].
    """
    of_first = of_last
    if made.hidden is not None:
        _product_into(out[1], made.active.mT, of_last)
        of_first = torch.ops.aten.gelu_backward(of_last @ matrices[1].mT, made.hidden)
    _product_into(out[0], of_first.mT, rows)
    return of_first @ matrices[0]


def _product_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Write a b to `out`, whatever its dtype; out: [B, H, n, k]; a: [B, H, n, m]; b: [B, H, m, k]."""
    if out.dtype == a.dtype:
        product_into(out, a, b)
    else:
        out.copy_(a @ b)
