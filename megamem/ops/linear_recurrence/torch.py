"""Linear recurrences over tokens, computed in matrix products over inner chunks: exact, whatever the inner chunk.

    S_t = a_t S_{t-1} + k_t w_t^T,   y_t = S_t^T q_t
    additive: w_t = v_t    (linear attention; with decay RetNet and its relatives)
    delta:    w_t = b_t (v_t - a_t S_{t-1}^T k_t)    (DeltaNet; with decay Gated DeltaNet, Yang et al., 2025)

Within an inner chunk, with g_t = a_1 ... a_t from its start and D[t, i] = g_t / g_i for i <= t:

    y = g Q S_0 + (Q K^T * D) W,   S = g_L S_0 + (g_L / g * K)^T W
    delta: W solves (I + strictly lower part of b K K^T * D) W = b (V - g K S_0)

Here * is elementwise, L the tokens of the inner chunk, and rows of Q, K, V and W its tokens. This is the chunkwise form
of Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", 2024, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


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
        query: [batch, heads, groups, tokens, key width]; the queries of a group read one head's memory.
        key, value: [batch, heads, tokens, key or value width].
        state: S before the first token, [batch, heads, key width, value width].
        log_decay: log a_t <= 0, [batch or 1, heads, tokens]; None: a = 1.
        rate: b_t of the delta rule, [batch, heads, tokens]; None: additive.
        resets: for each batch row the tokens at which S is zero before they write, ascending.
        inner: tokens of an inner chunk.
    Returns: y [batch, heads, groups, tokens, value width], S after the last token.
    """
    query, key, value = (x.to(state.dtype) for x in (query, key, value))
    outputs = []
    for begin in range(0, key.shape[-2], inner):
        part = slice(begin, begin + inner)
        output, state = _inner_chunk(
            query[..., part, :],
            key[..., part, :],
            value[..., part, :],
            state,
            None if log_decay is None else log_decay[..., part].to(state.dtype),
            None if rate is None else rate[..., part, None].to(state.dtype),
            _series(resets, begin, min(begin + inner, key.shape[-2]), state.device),
        )
        outputs.append(output)
    return torch.cat(outputs, dim=-2) if len(outputs) > 1 else outputs[0], state


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


def _inner_chunk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor,
    log_decay: Tensor | None,
    rate: Tensor | None,
    series: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Read and write the tokens of one inner chunk.

    Shapes are those of `linear_recurrence`, but rate is [batch, heads, tokens, 1]. series: see `_series`; between
    tokens of different series, and across a reset from and to S, every product of decays is zero.
    Returns: y [batch, heads, groups, tokens, value width]; S after the last token.
    """
    tokens = key.shape[-2]
    # reading = g Q, writing = g_L / g K, erasing = g K, kept = g_L S_0, between = D; g = 1 without decay
    reading, writing, kept = query, key, state
    if log_decay is None:
        between = torch.ones(tokens, tokens, dtype=key.dtype, device=key.device).tril()
        erasing = key
    else:
        total, between = decay_ratios(log_decay)
        since_start, until_end = total.exp()[..., None], (total[..., -1:] - total).exp()[..., None]
        reading, writing, erasing = query * since_start[..., None, :, :], key * until_end, key * since_start
        kept = state * since_start[..., -1:, :]
    if series is not None:
        of_state, of_last = (series == 0)[:, None, :, None], (series == series[:, -1:])[:, None, :, None]
        reading, erasing = torch.where(of_state[:, :, None], reading, 0), torch.where(of_state, erasing, 0)
        writing, kept = torch.where(of_last, writing, 0), torch.where(of_state[:, :, -1:], kept, 0)
        between = torch.where((series[:, :, None] == series[:, None])[:, None], between, 0)
    new = value
    if rate is not None:
        # the delta rule: what earlier tokens of the inner chunk wrote for similar keys is taken back
        overlap = rate * (key @ key.mT) * between
        new = torch.linalg.solve_triangular(
            overlap.tril(-1), rate * (value - erasing @ state), upper=False, unitriangular=True
        )
    scores = (query @ key[..., None, :, :].mT) * between[..., None, :, :]
    output = reading @ state[..., None, :, :] + scores @ new[..., None, :, :]
    return output, kept + writing.mT @ new
