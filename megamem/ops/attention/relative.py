"""Softmax attention to keys whose distance counts, as Transformer-XL has it (Dai et al., 2019, section 3.3).

    score(i, j) = ((q_i + u) . k_j + (q_i + v) . r_(i - j)) / sqrt(D),    r_d = W_r s_d

s_d is a row of sines and cosines of the distance d, u and v are learned. The last key is the last query's own, and no
query sees keys behind its own. The second product is made for each query and each distance, which lie in the table one
place further left for each query; read on from place T with one column less, they lie under their keys:

    distances of query 0   x 2 1 0        keys of query 0   1 0 . .      x: a distance that no query reads
    distances of query 1   x 2 1 0   =>   keys of query 1   2 1 0 .      .: keys behind the query, which are masked

Letters of shapes: T queries, K keys, B batch rows, H query heads, G key/value heads, D width of a head.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from megamem.ops.dropout import Dropout


@lru_cache(maxsize=8)
def sinusoids(count: int, clamp: int | None, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return s_d of the distances count - 1, ..., 1, 0: sines of all frequencies, then their cosines.

    The frequencies are 10,000^(-2i / width), i = 0 .. width / 2 - 1 (Vaswani et al., 2017). Cached, as all layers and
    chunks share them.

    Args:
        count: number of distances.
        clamp: distances beyond are this one; none are changed if it is None.
        width: width of a row, even.
        dtype: of the result; the angles are computed in float64.
        device: where it lies.
    Returns: [count, width].
    """
    with torch.inference_mode(False):
        distances = torch.arange(count - 1, -1, -1, dtype=torch.float64, device=device)
        distances = distances if clamp is None else distances.clamp(max=clamp)
        exponents = torch.arange(0, width, 2, dtype=torch.float64, device=device) / width
        angles = distances[:, None] * 10_000**-exponents
        return torch.cat((angles.sin(), angles.cos()), dim=-1).to(dtype)


def relative_attention(
    content_query: Tensor,
    distance_query: Tensor,
    key: Tensor,
    value: Tensor,
    distance_key: Tensor,
    unseen: Tensor,
    fused: bool = True,
    count: bool = False,
    dropout: Dropout | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attend from each query to the keys that it sees.

    Args:
        content_query: q + u, [T, B, H, D].
        distance_query: q + v, [T, B, H, D].
        key, value: [K, B, G, D], K >= T.
        distance_key: r_d of the distances K, ..., 1, 0: [K + 1, H, D].
        unseen: which keys a query does not see, bool [T, K] or [B, T, K]: at least those behind it.
        fused: False computes in float32 at least, operation by operation (for tests).
        count: whether to sum up the attention that each key gets, before any is dropped.
        dropout: drops shares; its place is that of the first query.
    Returns: [T, B, H, D] in the query's dtype; with `count` the attention of all queries and heads to each key, [K, B]
        in float32 at least and off the graph, else None.
    """
    tokens, batch, heads, width = content_query.shape
    given, compute = content_query.dtype, content_query.dtype
    if not fused and given != torch.float64:
        compute = torch.float32
    groups = heads // key.shape[2]
    # heads first, so that the products with distances are one matrix product for each head, whatever the rows
    query = _heads_first(content_query).to(compute) * width**-0.5
    keys, values = (_heads_first(x).to(compute).repeat_interleave(groups, dim=0) for x in (key, value))
    by_distance = (_heads_first(distance_query).to(compute) * width**-0.5).flatten(1, 2)
    table = by_distance @ distance_key.to(compute).permute(1, 2, 0)  # [H, B T, K + 1]
    bias = table.view(heads, batch, -1)[..., tokens:].unflatten(-1, (tokens, -1))  # [H, B, T, K]
    received: Tensor | None = None
    if fused and query.is_cuda and not count and dropout is None:
        bias = bias.masked_fill(unseen, -torch.inf)
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=1.0)
    else:
        scores = torch.baddbmm(bias.flatten(0, 1), query.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2))
        scores = scores.unflatten(0, (heads, batch)).masked_fill_(unseen, -torch.inf)
        exact = torch.float64 if compute == torch.float64 else torch.float32
        shares = scores.softmax(dim=-1, dtype=exact)
        received = shares.detach().sum((0, 2)).T if count else None
        shares = shares.to(compute)
        if dropout is not None:
            shares = dropout.shares(shares.transpose(0, 1), causal=True).transpose(0, 1)
        out = shares @ values
    return out.permute(2, 1, 0, 3).to(given), received


def _heads_first(x: Tensor) -> Tensor:
    """Reorder [T, B, H, D] to [H, B, T, D]."""
    return x.permute(2, 1, 0, 3)
