"""Attention to the nearest keys of a past alone, found by an exact search: matrix products and `torch.topk`.

The search decides which keys a query may see and has no gradient of its own; gradients flow through the scores and
values of the keys that were chosen. On the CPU and on CUDA devices alike it costs one product of queries by keys, half
of what dense attention to the same past costs. Shapes as in `megamem.ops.attention.softmax`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megamem.ops.attention.softmax import Past, past_attention
from megamem.ops.dropout import Dropout

SCORES = 2**25
"""Scores (rows x heads x queries x keys) that are held at once at most; more queries are taken in parts."""


@torch.no_grad()
def nearest(query: Tensor, past: Past, count: int) -> Past:
    """Return the past with a mask: each query sees the `count` keys with the largest product, or all if they are fewer.

    Args:
        query: [tokens, batch, heads, width].
        past: with `visible` as in any `Past`.
        count: keys of each query and head. Of keys with equal products any may be taken, `count` in all.
    """
    keys, batch = past.key.shape[:2]
    if count >= keys:
        return past
    # BF16 products would round to so few values that ties, not distances, decide
    compute = torch.float64 if query.dtype == torch.float64 else torch.float32
    q = query.to(compute).permute(1, 2, 0, 3)
    k = past.key.to(compute).permute(1, 2, 3, 0).repeat_interleave(query.shape[2] // past.key.shape[2], dim=1)
    # [batch, heads, tokens, keys]
    scores = q @ k
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    if past.visible is None:
        return Past(past.key, past.value, chosen.scatter_(-1, scores.topk(count, sorted=False).indices, True))
    visible = past.visible
    allowed = visible if visible.ndim == 4 else visible.expand(keys, batch).T[:, None, None]
    # rows with fewer visible keys than `count` get invisible ones too, which the last mask takes out again
    best = scores.masked_fill(~allowed, -torch.inf).topk(count, sorted=False).indices
    return Past(past.key, past.value, chosen.scatter_(-1, best, True) & allowed)


def nearest_attention(
    query: Tensor, past: Past, count: int, backend: str = "sdpa", dropout: Dropout | None = None
) -> Tensor:
    """Attend from each query to its `count` nearest keys; arguments and result as in `past_attention` and `nearest`.

    query: [tokens, batch, heads, width]. Many queries are taken in parts that the backward pass computes again, so that
    the table of queries by keys never exists as a whole.
    """

    def attend(queries: Tensor, key: Tensor, value: Tensor, first: int) -> Tensor:
        drops = None if dropout is None else dropout.after(first)
        return past_attention(queries, nearest(queries, Past(key, value, past.visible), count), backend, drops)

    tokens, batch, heads, _ = query.shape
    part = max(SCORES // (batch * heads * past.key.shape[0]), 1)
    if tokens <= part:
        return attend(query, past.key, past.value, 0)
    outputs = [
        checkpoint(attend, queries, past.key, past.value, part * i, use_reentrant=False, preserve_rng_state=False)
        for i, queries in enumerate(query.split(part))
    ]
    return torch.cat(outputs)
