"""Memories of several levels that one recurrence passes on, and that move from level to level: one step after another.

Log-linear attention (Guo et al., 2025) has an open memory and levels, all of which every step's tokens pass on by the
same transition; then whole levels move to others, as a counter carries, and the tokens' own writes are added:

    F[m] = P_n Z_n[m],   Z_{n+1}[m'] = sum over m that move to m' of F[m] + what step n writes into m'

`torch.autograd` would make a dozen kernels of each step's backward pass. Here it is derived by hand: with _x for the
gradient of the loss at x, and R the moves as a matrix of zeros and ones

    _F = R^T _Z_{n+1},   _P = sum over m of _F[m] Z_n[m]^T,   _Z_n = P^T _F + what the reads of Z_n add

Matrices are held transposed, so that those of all levels stand upon each other in one product with P^T. Letters of
shapes: B batch rows, H heads, N steps, M levels, W levels that are written into, D and V widths of keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megamem.ops.flat_view import flat_view


class Moves(NamedTuple):
    """Where levels go at the end of each step, and where its tokens' writes go."""

    matrices: Sequence[Tensor | None]
    """R of each step, [B, 1, M, M]: 1 where the second moves to the first. None: all stay."""
    written: Sequence[Sequence[int]]
    """The levels that each step writes into, W of M."""


def level_scan(transition: Tensor | None, writes: Tensor, first: Tensor, moves: Moves) -> tuple[Tensor, Tensor]:
    """Return the levels before each step, [B, H, N, M, V, D], and behind the last one, [B, H, M, V, D].

    Args:
        transition: P - I of each step, [B, H, N, D, D], or [B or 1, H, N, 1, 1] where P is a number; None: P = I.
        writes: what each step adds to each of its written levels, [B, H, N, W, V, D].
        first: the levels before the first step, [B, H, M, V, D].
        moves: of each step.
    """
    series, last = _LevelScan.apply(transition, writes, first, moves)
    return series, last


class _LevelScan(torch.autograd.Function):
    """See `level_scan`."""

    @staticmethod
    def forward(
        ctx: Any, transition: Tensor | None, writes: Tensor, first: Tensor, moves: Moves
    ) -> tuple[Tensor, Tensor]:
        """Return the levels before each step, [B, H, N, M, V, D], and behind the last one; see `level_scan`."""
        steps, last, between = writes.shape[2], first.new_empty(first.shape), first.new_empty(first.shape)
        series = first.new_empty(*first.shape[:2], steps, *first.shape[2:])
        series[:, :, 0] = first
        for n in range(steps):
            now = series[:, :, n]
            after = series[:, :, n + 1] if n + 1 < steps else last
            matrix = moves.matrices[n]
            if matrix is None:
                _pass(_at(transition, n), now, after)
            else:
                _move(matrix, _pass(_at(transition, n), now, between), after)
            for i, level in enumerate(moves.written[n]):
                after[:, :, level].add_(writes[:, :, n, i])
        ctx.moves = moves
        ctx.save_for_backward(transition, series)
        return series, last

    @staticmethod
    def backward(ctx: Any, of_series: Tensor, of_last: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of transition, writes and first, from those of the results, [B, H, (N,) M, V, D]."""
        transition, series = ctx.saved_tensors
        moves, steps = ctx.moves, series.shape[2]
        of_writes = series.new_empty(*series.shape[:3], len(moves.written[0]), *series.shape[4:])
        of_transition = None if transition is None else series.new_empty(*series.shape[:3], *transition.shape[-2:])
        of_now, between = of_last, series.new_empty(of_last.shape)
        for n in reversed(range(steps)):
            for i, level in enumerate(moves.written[n]):
                of_writes[:, :, n, i] = of_now[:, :, level]
            matrix, own = moves.matrices[n], _at(transition, n)
            of_passed = of_now if matrix is None else _move(matrix.mT, of_now, between)
            if own is not None and of_transition is not None:
                _of_transition(of_passed, series[:, :, n], of_transition[:, :, n])
            of_before = series.new_empty(of_last.shape)
            of_now = _pass(None if own is None else own.mT, of_passed, of_before).add_(of_series[:, :, n])
        if of_transition is not None and transition.shape[0] == 1:
            of_transition = of_transition.sum(0, keepdim=True)
        return of_transition, of_writes, of_now, None


def _at(transition: Tensor | None, n: int) -> Tensor | None:
    """Return P - I of step n, [B or 1, H, D, D] or [B or 1, H, 1, 1]."""
    return None if transition is None else transition[:, :, n]


def _pass(transition: Tensor | None, x: Tensor, out: Tensor) -> Tensor:
    """Write what P leaves of transposed matrices x [B, H, M, V, D] to `out`, and return it; None: P = I."""
    if transition is None:
        return out.copy_(x)
    if transition.shape[-1] == 1:
        return torch.addcmul(x, transition[:, :, None], x, out=out)
    rows = x.flatten(2, 3).flatten(0, 1)
    torch.baddbmm(rows, rows, transition.mT.flatten(0, 1), out=flat_view(flat_view(out, 2, 3), 0, 1))
    return out


def _of_transition(of_passed: Tensor, x: Tensor, out: Tensor) -> None:
    """Write the gradient of P - I to `out`, [B, H, D, D] or [B, H, 1, 1].

    of_passed: that of what is left of x; both [B, H, M, V, D].
    """
    if out.shape[-1] == 1:
        out.copy_((of_passed * x).sum((2, 3, 4))[..., None, None])
    else:
        rows, others = (each.flatten(2, 3).flatten(0, 1) for each in (of_passed, x))
        torch.bmm(rows.mT, others, out=flat_view(out, 0, 1))


def _move(moves: Tensor, x: Tensor, out: Tensor) -> Tensor:
    """Write the levels x [B, H, M, V, D] to where they have moved to in `out`, and return it; moves: [B, 1, M, M]."""
    rows = moves.expand(-1, x.shape[1], -1, -1).flatten(0, 1)
    torch.bmm(rows, x.flatten(3).flatten(0, 1), out=flat_view(flat_view(out, 3, 4), 0, 1))
    return out
