"""Linear recurrences over tokens, computed in matrix products over inner chunks: exact, whatever the inner chunk.

    S_t = a_t S_{t-1} + k_t w_t^T,   y_t = S_t^T q_t
    additive: w_t = v_t    (linear attention; with decay RetNet and its relatives)
    delta:    w_t = b_t (v_t - a_t S_{t-1}^T k_t)    (DeltaNet; with decay Gated DeltaNet, Yang et al., 2025)

Within an inner chunk, with g_t = a_1 ... a_t from its start and D[t, i] = g_t / g_i for i <= t:

    y = g Q S_0 + (Q K^T * D) W,   S = g_L S_0 + (g_L / g * K)^T W
    additive: W = V
    delta:    W solves (I + strictly lower part of b K K^T * D) W = b (V - g K S_0),   so W = U - E S_0

Here * is elementwise, L the tokens of the inner chunk, and rows of Q, K, V and W its tokens. This is the chunkwise form
of Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", 2024, section 3.

Of this only S goes from one inner chunk to the next. So everything else is computed for many inner chunks at once, and
what remains between them is a recurrence over their borders:

    additive: S_{n+1} = c_n S_n + X_n    c_n = g_L, X_n = (g_L / g * K)^T V; again a sum with decays, one product
    delta:    S_{n+1} = P_n S_n + X_n    P_n = g_L I - (g_L / g * K)^T E, X_n = (g_L / g * K)^T U; one by one

Letters of shapes: B batch rows, H heads, G queries that read one head's memory, N inner chunks, L tokens of each, D and
V widths of keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megamem.ops.slices import parts

TOGETHER = 64
"""Most inner chunks that are computed at once: the product over their borders grows with the square of their number."""


def linear_recurrence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor,
    log_decay: Tensor | None = None,
    rate: Tensor | None = None,
    resets: Sequence[Sequence[int]] = (),
    inner: int = 64,
) -> tuple[Tensor, Tensor]:
    """Read and write token by token, in the dtype of `state`.

    Args:
        query: [B, H, G, T, D].
        key, value: [B, H, T, D] and [B, H, T, V].
        state: S before the first token, [B, H, D, V].
        log_decay: log a_t <= 0, [B or 1, H, T]; None: a = 1.
        rate: b_t of the delta rule, [B, H, T]; None: additive.
        resets: for each batch row the tokens at which S is zero before they write, ascending.
        inner: tokens of an inner chunk.
    Returns: y [B, H, G, T, V], S after the last token.
    """
    # cast and laid out in one pass over each
    laid_out = torch.contiguous_format
    query, key, value = (x.to(state.dtype, memory_format=laid_out).contiguous() for x in (query, key, value))
    log_decay, rate = (None if gate is None else gate.to(state.dtype) for gate in (log_decay, rate))
    sizes, outputs, begin = _stretches(key.shape[-2], inner), [], 0

    def cut(x: Tensor, axis: int) -> list[Tensor]:
        """Cut the tokens of x, which lie on an axis, into stretches, and these into inner chunks [..., N, L, ...]."""
        return [part.unflatten(axis, (-1, min(inner, part.shape[axis]))) for part in parts(x, sizes, axis)]

    nothing: list[Tensor | None] = [None] * len(sizes)
    decays, rates = (nothing if gate is None else cut(gate, -1) for gate in (log_decay, rate))
    for q, k, v, decay, b in zip(cut(query, -2), cut(key, -2), cut(value, -2), decays, rates, strict=True):
        end = begin + k.shape[-3] * k.shape[-2]
        series = _series(resets, begin, end, state.device)
        if series is not None:
            series = series.unflatten(-1, k.shape[-3:-1])
        output, state = _read_and_write(InnerChunks(q, k, v, decay, b, series), state)
        outputs.append(output.flatten(-3, -2))
        begin = end
    return torch.cat(outputs, dim=-2) if len(outputs) > 1 else outputs[0], state


def _stretches(tokens: int, inner: int) -> list[int]:
    """Return the lengths of stretches of whole inner chunks, and of the inner chunk that is left over."""
    whole, step = tokens - tokens % inner, TOGETHER * inner
    stretches = [min(step, whole - begin) for begin in range(0, whole, step)]
    return [*stretches, tokens - whole] if whole < tokens else stretches


class InnerChunks(NamedTuple):
    """Tokens cut into inner chunks of equal length."""

    query: Tensor
    """[B, H, G, N, L, D]"""
    key: Tensor
    """[B, H, N, L, D]"""
    value: Tensor
    """[B, H, N, L, V]"""
    log_decay: Tensor | None
    """[B or 1, H, N, L]"""
    rate: Tensor | None
    """[B, H, N, L]"""
    series: Tensor | None
    """[B, N, L] int64, see `_series`"""


def _read_and_write(chunks: InnerChunks, state: Tensor) -> tuple[Tensor, Tensor]:
    """Read and write inner chunks, all at once but for what goes from one to the next.

    state: S before the first token, [B, H, D, V]. Returns: y [B, H, G, N, L, V]; S after the last token.
    """
    query, key, value, log_decay, rate, series = chunks
    tokens = key.shape[-2]
    # reading = g Q, writing = g_L / g K, erasing = g K, between = D; g = 1 without decay
    reading, writing, erasing = query, key, key
    log_kept = None
    if log_decay is None:
        between = torch.ones(tokens, tokens, dtype=key.dtype, device=key.device).tril()[None, None, None]
    else:
        total, between = decay_ratios(log_decay)
        since_start, until_end = total.exp()[..., None], (total[..., -1:] - total).exp()[..., None]
        reading, writing, erasing = query * since_start[:, :, None], key * until_end, key * since_start
        log_kept = total[..., -1]
    numbers = None
    if series is not None:
        # the series that each inner chunk begins and ends with
        numbers = torch.cat((torch.zeros_like(series[:, :1, 0]), series[..., -1]), dim=1)
        first, last = numbers[:, :-1, None], numbers[:, 1:, None]
        of_state, of_last = (series == first)[:, None, ..., None], (series == last)[:, None, ..., None]
        reading, erasing = torch.where(of_state[:, :, None], reading, 0), torch.where(of_state, erasing, 0)
        writing = torch.where(of_last, writing, 0)
        between = torch.where((series[..., :, None] == series[..., None, :])[:, None], between, 0)
    scores = (query @ key.mT[:, :, None]) * between[:, :, None]
    new, states = value, None  # states: S before each inner chunk, and after the last
    if rate is not None:
        # the delta rule: what earlier tokens of the inner chunk wrote for similar keys is taken back
        overlap = (rate[..., None] * (key @ key.mT) * between).tril(-1)

        def solved(right: Tensor) -> Tensor:
            """Return the solution of (I + overlap) X = b right, [B, H, N, L, ...]."""
            return torch.linalg.solve_triangular(overlap, rate[..., None] * right, upper=False, unitriangular=True)

        if key.shape[2] == 1:
            new = solved(value - erasing @ state[:, :, None])
        else:
            sizes = value.shape[-1], key.shape[-1]
            written, erased = solved(torch.cat((value, erasing), dim=-1)).split(sizes, dim=-1)
            states = _products(state, writing.mT @ written, -writing.mT @ erased, log_kept, numbers)
            new = written - erased @ states[0]
    if states is None:
        states = _sums(state, writing.mT @ new, log_kept, numbers)
    before, after = states
    return _sum_of_products(reading, before, scores, new), after


def _sum_of_products(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Return a b + c d [B, H, G, N, L, V], added as the second product is made.

    a: [B, H, G, N, L, D]; b: [B, H, N, D, V]; c: [B, H, G, N, L, L]; d: [B, H, N, L, V].
    """
    if a.shape[2] > 1:
        # one product for each of the G query heads that read a memory
        b, d = (x[:, :, None].expand(*a.shape[:4], *x.shape[3:]) for x in (b, d))
    shape = (*a.shape[:-1], b.shape[-1])
    a, b, c, d = (x.reshape(-1, *x.shape[-2:]) for x in (a, b, c, d))
    return torch.baddbmm(torch.bmm(a, b), c, d).view(shape)


def _sums(
    state: Tensor, writes: Tensor, log_kept: Tensor | None, numbers: Tensor | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return S before each inner chunk [B, H, N, D, V], and after the last one, of S_{n+1} = c_n S_n + X_n.

    Args:
        state: S_0 [B, H, D, V].
        writes: X [B, H, N, D, V].
        log_kept: log c [B or 1, H, N]; None: c = 1.
        numbers: of the series that goes on across each border, [B, N + 1] int64; None: there are no resets.
    """
    if writes.shape[2] == 1:
        kept = state if log_kept is None else log_kept.exp()[..., None] * state
        if numbers is not None:
            kept = torch.where((numbers[:, 1] == numbers[:, 0])[:, None, None, None], kept, 0)
        return state[:, :, None], kept + writes[:, :, 0]
    # what is left of the first S and of each write at each border
    borders = writes.shape[2] + 1
    logs = writes.new_zeros(1, 1, borders) if log_kept is None else F.pad(log_kept, (1, 0))
    _, left = decay_ratios(logs)
    if numbers is not None:
        left = torch.where((numbers[:, :, None] == numbers[:, None])[:, None], left, 0)
    before, after = _Sums.apply(left, state, writes)
    return before, after


class _Sums(torch.autograd.Function):
    """Sums over the borders of inner chunks; autograd would pad both results' gradients with zeros to add them."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, state: Tensor, writes: Tensor) -> tuple[Tensor, Tensor]:
        """Return S before each inner chunk, and after the last one; see `_sums`.

        left: what is left of each term at each border, [B or 1, H or 1, N + 1, N + 1].
        """
        ctx.save_for_backward(left, state, writes)
        terms = _terms(state, writes).flatten(3)
        before, after = left[..., :-1, :] @ terms, left[..., -1:, :] @ terms
        return before.unflatten(3, state.shape[2:]), after.view(state.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        """Return the gradients of what `forward` was given, from those of its results [B, H, N, D, V], [B, H, D, V]."""
        left, state, writes = ctx.saved_tensors
        of_borders = torch.cat((gradients[0], gradients[1][:, :, None]), dim=2).flatten(3)
        of_terms = (left.mT @ of_borders).unflatten(3, state.shape[2:])
        of_left = None
        if ctx.needs_input_grad[0]:
            of_left = (of_borders @ _terms(state, writes).flatten(3).mT).sum_to_size(left.shape)
        return of_left, of_terms[:, :, 0], of_terms[:, :, 1:]


def _terms(state: Tensor, writes: Tensor) -> Tensor:
    """Return the first S and all writes, [B, H, N + 1, D, V]; see `_sums`."""
    return torch.cat((state[:, :, None], writes), dim=2)


def _products(
    state: Tensor, writes: Tensor, changes: Tensor, log_kept: Tensor | None, numbers: Tensor | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the same as `_sums` of S_{n+1} = P_n S_n + X_n, P_n = c_n I + changes_n.

    changes: [B, H, N, D, D]; the rest as in `_sums`.
    """
    kept = (
        torch.ones_like(changes[..., 0]) if log_kept is None else log_kept.exp()[..., None].expand(changes.shape[:-1])
    )
    if numbers is not None:
        kept = torch.where((numbers[:, 1:] == numbers[:, :-1])[:, None, :, None], kept, 0)
    factors = (changes + torch.diag_embed(kept)).flatten(0, 1)
    states = [state.flatten(0, 1)]
    for factor, write in zip(factors.unbind(1), writes.flatten(0, 1).unbind(1), strict=True):
        states.append(torch.baddbmm(write, factor, states[-1]))
    before = torch.stack(states[:-1], dim=1).unflatten(0, state.shape[:2])
    return before, states[-1].unflatten(0, state.shape[:2])


def decay_ratios(logs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the products of a series of numbers up to each token, and between each two tokens.

    logs: the logarithms, [..., tokens].
    Returns: the logarithms of the products over l <= t, [..., tokens]; the products over i < l <= t, which are lower
        triangular, [..., t, i].
    """
    total = logs.cumsum(-1)
    tokens = logs.shape[-1]
    lower = torch.ones(tokens, tokens, dtype=torch.bool, device=logs.device).tril()
    # differences of logarithms: the products up to t and to i may both underflow, though their ratio does not
    return total, (total[..., :, None] - total[..., None, :]).masked_fill(~lower, -torch.inf).exp()


def _series(resets: Sequence[Sequence[int]], begin: int, end: int, device: torch.device) -> Tensor | None:
    """Return the number of resets up to each token from `begin` to `end` - 1, [batch, tokens] int64.

    Tokens of one number are a series without a reset; 0 is the one that came in. None where there is no reset.
    """
    inside = [[place - begin for place in row if begin <= place < end] for row in resets]
    if not any(inside):
        return None
    # few additions on the device: a copy of host values could make the host wait
    series = torch.zeros(len(inside), end - begin, dtype=torch.int64, device=device)
    for row, places in enumerate(inside):
        for place in places:
            series[row, place:] += 1
    return series
