"""Attention of memory rows to what has come since, and its mixture with what they read before (LaMemo).

Ji et al., "LaMemo: Language Modeling with Look-Ahead Memory", 2022, sections 3.1 to 3.3. Memory rows 0 .. M-1 stand in
front of the first token of a segment, number M. Row i attends to those of the newest K of 1 .. M that come behind it:

    score(i, j) = ((q_i + u) . k_j + (q_i + v) . r_(j - i)) / sqrt(D),    j > i

Scores by distance lie as in `relative.py`, but distances ascend with the keys:

    distances of row 0   0 1 2 3        keys of row 0   1 2 3        .: keys that are not behind the row, masked
    distances of row 1   0 1 2 3   =>   keys of row 1   . 1 2
    distances of row 2   0 1 2 3        keys of row 2   . . 1

Letters of shapes: M memory rows, K keys, B batch rows, H query heads, G key/value heads, D width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megamem.ops.attention.relative import (
    Attended,
    Block,
    attend_by_blocks,
    attend_by_scores,
    attended,
    distance_scores,
    heads_first,
    query_blocks,
)
from megamem.ops.dropout import Dropout
from megamem.ops.tables import kept_table

EPSILON = 1e-6
"""Added to the sum that the share of the old is divided by, in the authors' code."""


@kept_table(32)
def unseen_ahead(rows: int, keys: int, ordered: bool, hidden: tuple[int, ...] | None, device: torch.device) -> Tensor:
    """Return which of the newest `keys` keys a memory row does not see. Cached for all layers.

    Args:
        rows: number of memory rows; the last key is the place behind the last of them.
        keys: number of keys.
        ordered: whether a row sees only what comes behind it.
        hidden: how many of the first memory rows nobody sees, for each batch row; None: all are seen.
        device: where the result lies.
    Returns: bool [rows, keys], or [batch, rows, keys] where rows are masked.
    """
    places = torch.arange(rows + 1 - keys, rows + 1, device=device)
    unseen = (places <= torch.arange(rows, device=device)[:, None]) & ordered
    if hidden is None:
        return unseen
    first = torch.tensor(hidden, device=device)
    return unseen | (places < first[:, None, None])


def look_ahead_attention(
    content_query: Tensor,
    distance_query: Tensor,
    key: Tensor,
    value: Tensor,
    distance_key: Tensor,
    unseen: Tensor,
    ordered: bool = True,
    fused: bool = True,
    dropout: Dropout | None = None,
) -> Attended:
    """Attend from memory rows to the newest places up to the one behind the last row.

    Args:
        content_query: q + u, [M, B, H, D].
        distance_query: q + v, [M, B, H, D].
        key, value: of the places M - K + 1, ..., M: [K, B, G, D], K <= M.
        distance_key: r_d of the distances 0, 1, ..., M: [M + 1, H, D]; unless `ordered` of -M, ..., M: [2 M + 1, H, D].
        unseen: `unseen_ahead`.
        ordered: whether a row sees only what comes behind it.
        fused: False computes in float32 at least, operation by operation (for tests).
        dropout: drops shares; its place is that of the first row.
    Returns: as `relative_attention`, with the logarithms of sums, through which gradients flow.
    """
    parts = heads_first(content_query, distance_query, key, value, distance_key, fused)
    query, by_distance, keys, values, table = parts
    if not fused or dropout is not None or query.is_cuda:
        scores = _all_scores(query, by_distance, keys, table, ordered)
        out, _, sums = attend_by_scores(scores, values, unseen, False, dropout, log_sums=True, causal=False)
    else:
        rows = query.shape[2]
        blocks = [_block(own, rows, keys.shape[2], ordered) for own in query_blocks(rows)]
        out, sums = attend_by_blocks(*parts, unseen, blocks, log_sums=True)
    return attended(out, None, sums, content_query.dtype)


def look_ahead_shares(
    content_query: Tensor,
    distance_query: Tensor,
    key: Tensor,
    distance_key: Tensor,
    unseen: Tensor,
    ordered: bool = True,
) -> Tensor:
    """Return what each memory row gives to each key, [B, H, M, K] in float32 at least; see `relative_shares`.

    Arguments: see `look_ahead_attention`.
    """
    parts = heads_first(content_query, distance_query, key, key, distance_key, fused=False)
    query, by_distance, keys, _, table = parts
    scores = _all_scores(query, by_distance, keys, table, ordered)
    return scores.masked_fill(unseen, -torch.inf).softmax(dim=-1).transpose(0, 1)


def _all_scores(query: Tensor, by_distance: Tensor, keys: Tensor, table: Tensor, ordered: bool) -> Tensor:
    """Return the scores of all memory rows and keys, [H, B, M, K], seen or not.

    query, by_distance, keys, table: see `heads_first`; ordered: see `look_ahead_attention`.
    """
    rows, count = query.shape[2], keys.shape[2]
    block = _block(slice(0, rows), rows, count, ordered, whole=True)
    by_place = distance_scores(by_distance, table[:, block.distances], block.offset)[..., :count]
    return query @ keys.transpose(2, 3) + by_place


def _block(own: slice, rows: int, keys: int, ordered: bool, whole: bool = False) -> Block:
    """Return where memory rows `own` of all `rows` meet the newest `keys` keys.

    whole: all keys are read; if not, those that some of the rows see.
    """
    oldest = rows + 1 - keys
    first = oldest if whole or not ordered else max(oldest, own.start + 1)
    # the table begins with the distance from the last of the rows to the place before the first key; ordered, with 0
    tokens = own.stop - own.start
    least = first - own.start - tokens
    least = max(least, 0) if ordered else least
    shift = 0 if ordered else rows
    return Block(
        own,
        slice(first - oldest, keys),
        slice(least + shift, rows - own.start + 1 + shift),
        first - own.start - least,
    )


def interpolate(old: Tensor, old_sums: Tensor, new: Tensor, new_sums: Tensor) -> tuple[Tensor, Tensor]:
    """Mix what memory rows have read before with what they read now, each by the sum of its scores' exponentials.

        a = s_old / (s_old + s_new + epsilon),    c = a c_old + (1 - a) c_new

    Sums are given as logarithms; epsilon acts after both are divided by the larger one. a has the sums' dtype.

    Args:
        old: recorded vectors, [M, B, H, D]; no gradient should reach them.
        old_sums: their recorded logarithms of sums, [M, B, H] in float32 at least.
        new, new_sums: of the look-ahead, like these.
    Returns: c, like `new`; the logarithm of the sum over both, [M, B, H].
    """
    share, sums = share_of_old(old_sums, new_sums)
    return torch.lerp(new, old, share.to(new.dtype)[..., None]), sums


def share_of_old(old_sums: Tensor, new_sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return a of `interpolate`, and the logarithm of the sum over both: [M, B, H] like the arguments."""
    largest = torch.maximum(old_sums, new_sums)
    of_old, of_new = (old_sums - largest).exp(), (new_sums - largest).exp()
    return of_old / (of_old + of_new + EPSILON), largest + (of_old + of_new).log()
