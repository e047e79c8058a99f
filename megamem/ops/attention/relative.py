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

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megamem.ops.dropout import Dropout
from megamem.ops.tables import kept_table

QUERIES_AT_ONCE = 128
"""Queries of a block on the CPU: fewer make matrix products small, the scores of more fill its caches."""


@kept_table(8)
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
    given, width = content_query.dtype, content_query.shape[3]
    compute = torch.float32 if not fused and given != torch.float64 else given
    groups = content_query.shape[2] // key.shape[2]
    # heads first, so that the products with distances are one matrix product for each head, whatever the rows
    query, by_distance = (_heads_first(x).to(compute) * width**-0.5 for x in (content_query, distance_query))
    keys, values = (_heads_first(x).to(compute).repeat_interleave(groups, dim=0) for x in (key, value))
    table = distance_key.to(compute).transpose(0, 1)  # [H, K + 1, D]
    received: Tensor | None = None
    if not fused or count or dropout is not None:
        scores = query @ keys.transpose(2, 3) + _distance_scores(by_distance, table)
        shares = scores.masked_fill(unseen, -torch.inf).softmax(dim=-1, dtype=_exact(compute))
        received = shares.detach().sum((0, 2)).T if count else None
        shares = shares.to(compute)
        if dropout is not None:
            shares = dropout.shares(shares.transpose(0, 1), causal=True).transpose(0, 1)
        out = shares @ values
    elif query.is_cuda:
        bias = _distance_scores(by_distance, table).masked_fill(unseen, -torch.inf)
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=1.0)
    else:
        out = _BlockByBlock.apply(query, by_distance, keys, values, table, unseen)
    return out.permute(2, 1, 0, 3).to(given), received


def _exact(compute: torch.dtype) -> torch.dtype:
    """Return the dtype that shares of attention are computed in."""
    return torch.float64 if compute == torch.float64 else torch.float32


def _heads_first(x: Tensor) -> Tensor:
    """Reorder [T, B, H, D] to [H, B, T, D]."""
    return x.permute(2, 1, 0, 3)


def _distance_scores(query: Tensor, table: Tensor) -> Tensor:
    """Return products of queries [H, B, T, D] and the distances of keys [H, B, T, K]; table: [H, K + 1, D]."""
    heads, batch, tokens, _ = query.shape
    products = query.flatten(1, 2) @ table.transpose(1, 2)  # [H, B T, K + 1]
    return products.view(heads, batch, -1)[..., tokens:].unflatten(-1, (tokens, -1))


class _BlockByBlock(torch.autograd.Function):
    """The same on the CPU, a block of queries after the other, each with the keys up to its own last one.

    The scores of a block stay in the processor's cache, and keys behind it cost nothing. The backward pass has the
    shares of all blocks and nothing else of their size.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, by_distance: Tensor, key: Tensor, value: Tensor, table: Tensor, unseen: Tensor
    ) -> Tensor:
        """Return [H, B, T, D].

        Args:
            query, by_distance: q + u and q + v, scaled, [H, B, T, D].
            key, value: [H, B, K, D].
            table: r_d of the distances K, ..., 1, 0: [H, K + 1, D].
            unseen: bool [T, K] or [B, T, K].
        """
        query, by_distance, key, value, table = (x.contiguous() for x in (query, by_distance, key, value, table))
        heads, batch, tokens = query.shape[:3]
        out, kept = torch.empty_like(query), []
        for begin, end in _query_blocks(tokens):
            seen = key.shape[2] - tokens + end
            here, there = query[:, :, begin:end].flatten(0, 1), key[:, :, :seen].flatten(0, 1)
            scores = _distance_scores(by_distance[:, :, begin:end], table[:, -seen - 1 :]).flatten(0, 1)
            scores = torch.baddbmm(scores, here, there.transpose(1, 2)).unflatten(0, (heads, batch))
            scores.masked_fill_(unseen[..., begin:end, :seen], -torch.inf)
            shares = scores.softmax(dim=-1, dtype=_exact(scores.dtype))
            kept.append(shares)
            out[:, :, begin:end] = shares.to(value.dtype) @ value[:, :, :seen]
        ctx.save_for_backward(query, by_distance, key, value, table, *kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of all arguments of `forward`; gradient: [H, B, T, D]."""
        query, by_distance, key, value, table, *kept = ctx.saved_tensors
        of_query, of_by_distance = torch.empty_like(query), torch.empty_like(by_distance)
        # sums over blocks, which BF16 would round again and again
        exact = _exact(query.dtype)
        of_key, of_value, of_table = (torch.zeros_like(x, dtype=exact) for x in (key, value, table))
        for (begin, end), shares in zip(_query_blocks(query.shape[2]), kept, strict=True):
            count, seen = end - begin, shares.shape[3]
            here, out = query[:, :, begin:end], gradient[:, :, begin:end]
            of_shares = (out @ value[:, :, :seen].transpose(2, 3)).to(shares.dtype)
            of_value[:, :, :seen] += shares.to(value.dtype).transpose(2, 3) @ out
            # scores lie behind as many places of distances that no query reads: see `_distance_scores`
            products = query.new_zeros(*query.shape[:2], count * (seen + 1))
            scores = products[..., count:].unflatten(-1, (count, seen))
            scores.copy_(torch._softmax_backward_data(of_shares, shares, -1, shares.dtype))
            of_query[:, :, begin:end] = scores @ key[:, :, :seen]
            of_key[:, :, :seen] += scores.transpose(2, 3) @ here
            products = products.view(query.shape[0], -1, seen + 1)  # [H, B queries, distances]
            of_by_distance[:, :, begin:end] = (products @ table[:, -seen - 1 :]).unflatten(1, (-1, count))
            of_table[:, -seen - 1 :] += products.transpose(1, 2) @ by_distance[:, :, begin:end].flatten(1, 2)
        return of_query, of_by_distance, of_key.to(key), of_value.to(value), of_table.to(table), None


def _query_blocks(tokens: int) -> list[tuple[int, int]]:
    """Return the first query of each block, and the one behind its last."""
    return [(begin, min(begin + QUERIES_AT_ONCE, tokens)) for begin in range(0, tokens, QUERIES_AT_ONCE)]
