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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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


class Attended(NamedTuple):
    """What attention gives."""

    out: Tensor
    """[T, B, H, D] in the query's dtype."""
    received: Tensor | None
    """The attention of all queries and heads to each key, [K, B] in float32 at least, off the graph, if asked for."""
    log_sums: Tensor | None
    """The logarithm of the sum of exponentials of each query's scores, [T, B, H] in float32 at least, if asked for."""


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
    log_sums: bool = False,
) -> Attended:
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
        log_sums: whether to return the logarithms of sums.
    """
    parts = heads_first(content_query, distance_query, key, value, distance_key, fused)
    query, by_distance, keys, values, table = parts
    received = sums = None
    if not fused or count or dropout is not None or (query.is_cuda and log_sums):
        scores = _all_scores(query, by_distance, keys, table)
        out, received, sums = attend_by_scores(scores, values, unseen, count, dropout, log_sums, causal=True)
    elif query.is_cuda:
        bias = distance_scores(by_distance, table, query.shape[2]).masked_fill(unseen, -torch.inf)
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=1.0)
    else:
        blocks = _causal_blocks(query.shape[2], keys.shape[2])
        out, sums = attend_by_blocks(*parts, unseen, blocks, log_sums)
    return attended(out, received, sums, content_query.dtype)


def relative_shares(
    content_query: Tensor, distance_query: Tensor, key: Tensor, distance_key: Tensor, unseen: Tensor
) -> Tensor:
    """Return what each query gives to each key, [B, H, T, K] in float32 at least: those of a query sum to one.

    Arguments: see `relative_attention`, which needs no such tensor. For those who look on.
    """
    parts = heads_first(content_query, distance_query, key, key, distance_key, fused=False)
    query, by_distance, keys, _, table = parts
    scores = _all_scores(query, by_distance, keys, table)
    return scores.masked_fill(unseen, -torch.inf).softmax(dim=-1).transpose(0, 1)


def _all_scores(query: Tensor, by_distance: Tensor, keys: Tensor, table: Tensor) -> Tensor:
    """Return the scores of all queries and keys, [H, B, T, K], seen or not; arguments: see `heads_first`."""
    return query @ keys.transpose(2, 3) + distance_scores(by_distance, table, query.shape[2])


def heads_first(
    content_query: Tensor, distance_query: Tensor, key: Tensor, value: Tensor, distance_key: Tensor, fused: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Reorder the arguments of `relative_attention`, so that products with distances are one matrix product per head.

    content_query, distance_query: [T, B, H, D]; key, value: [K, B, G, D]; distance_key: [distances, H, D].
    Returns: both queries, scaled, [H, B, T, D]; keys and values [H, B, K, D]; the table [H, distances, D]. Unless
    `fused`, in float32 at least.
    """
    given, width = content_query.dtype, content_query.shape[3]
    compute = torch.float32 if not fused and given != torch.float64 else given
    groups = content_query.shape[2] // key.shape[2]
    query, by_distance = (x.permute(2, 1, 0, 3).to(compute) * width**-0.5 for x in (content_query, distance_query))
    keys, values = (x.permute(2, 1, 0, 3).to(compute).repeat_interleave(groups, dim=0) for x in (key, value))
    return query, by_distance, keys, values, distance_key.to(compute).transpose(0, 1)


def attended(out: Tensor, received: Tensor | None, log_sums: Tensor | None, dtype: torch.dtype) -> Attended:
    """Return results with heads first, out [H, B, T, D] and log_sums [H, B, T], in the order of `Attended`.

    received: [K, B] as it is; dtype: of the output.
    """
    return Attended(
        out.permute(2, 1, 0, 3).to(dtype), received, None if log_sums is None else log_sums.permute(2, 1, 0)
    )


def attend_by_scores(
    scores: Tensor,
    values: Tensor,
    unseen: Tensor,
    count: bool,
    dropout: Dropout | None,
    log_sums: bool,
    causal: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Attend with all scores at hand.

    Args:
        scores: [H, B, T, K].
        values: [H, B, K, D].
        unseen: bool [T, K] or [B, T, K].
        count, log_sums: see `relative_attention`.
        dropout: drops shares.
        causal: how it counts keys (`Dropout.shares`).
    Returns: out [H, B, T, D]; the attention to each key [K, B]; logarithms of sums [H, B, T].
    """
    compute = scores.dtype
    seen = scores.masked_fill(unseen, -torch.inf)
    shares = seen.softmax(dim=-1, dtype=_exact(compute))
    received = shares.detach().sum((0, 2)).T if count else None
    sums = seen.to(_exact(compute)).logsumexp(-1) if log_sums else None
    shares = shares.to(compute)
    if dropout is not None:
        shares = dropout.shares(shares.transpose(0, 1), causal).transpose(0, 1)
    return shares @ values, received, sums


def _exact(compute: torch.dtype) -> torch.dtype:
    """Return the dtype that shares of attention are computed in."""
    return torch.float64 if compute == torch.float64 else torch.float32


def distance_scores(query: Tensor, table: Tensor, offset: int) -> Tensor:
    """Return products of queries [H, B, T, D] and the distances that lie under their keys, [H, B, T, distances - 1].

    table: [H, distances, D], of which query i reads the rows from `offset` - i on.
    """
    heads, batch, tokens, _ = query.shape
    products = query.flatten(1, 2) @ table.transpose(1, 2)  # [H, B T, distances]
    return _shifted(products.view(heads, batch, -1), offset, tokens)


def _shifted(products: Tensor, offset: int, tokens: int) -> Tensor:
    """Read products [H, B, T * distances] from place `offset` on with one column less: [H, B, T, distances - 1]."""
    columns = products.shape[2] // tokens - 1
    return products[..., offset : offset + tokens * columns].unflatten(-1, (tokens, columns))


@dataclass(frozen=True)
class Block:
    """Queries that are read together, with the keys that some of them see."""

    queries: slice
    keys: slice
    distances: slice
    """The rows of the table whose products with all of the queries are made."""
    offset: int
    """The place among these under the first query's first key; see `distance_scores`. At most the number of queries."""


def query_blocks(tokens: int) -> list[slice]:
    """Cut queries into blocks."""
    return [slice(begin, min(begin + QUERIES_AT_ONCE, tokens)) for begin in range(0, tokens, QUERIES_AT_ONCE)]


def _causal_blocks(tokens: int, keys: int) -> list[Block]:
    """Return the blocks of causal attention, each with the keys up to its own last one."""
    blocks = []
    for own in query_blocks(tokens):
        seen = keys - tokens + own.stop
        blocks.append(Block(own, slice(0, seen), slice(keys - seen, keys + 1), own.stop - own.start))
    return blocks


def attend_by_blocks(
    query: Tensor,
    by_distance: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    unseen: Tensor,
    blocks: Sequence[Block],
    log_sums: bool,
) -> tuple[Tensor, Tensor | None]:
    """Attend on the CPU block by block: out [H, B, T, D]; logarithms of sums [H, B, T], with a gradient, if asked for.

    Arguments: see `_BlockByBlock`.
    """
    out, *sums = _BlockByBlock.apply(query, by_distance, key, value, table, unseen, blocks, log_sums)
    return out, (sums[0] if sums else None)


class _BlockByBlock(torch.autograd.Function):
    """Attention on the CPU, a block of queries after the other, each with the keys that it sees.

    The scores of a block stay in the processor's cache, and keys that none of its queries sees cost nothing. The
    backward pass has the shares of all blocks and nothing else of their size.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, by_distance: Tensor, key: Tensor, value: Tensor, table: Tensor, unseen: Tensor,
        blocks: Sequence[Block], log_sums: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Return [H, B, T, D], and with `log_sums` the logarithms of sums [H, B, T].

        Args:
            query, by_distance: q + u and q + v, scaled, [H, B, T, D].
            key, value: [H, B, K, D].
            table: r_d of the distances in the order of keys, [H, distances, D].
            unseen: bool [T, K] or [B, T, K].
            blocks: where queries, keys and distances meet.
            log_sums: whether to return the logarithms.
        """
        query, by_distance, key, value, table = (x.contiguous() for x in (query, by_distance, key, value, table))
        heads, batch, tokens = query.shape[:3]
        exact = _exact(query.dtype)
        out, kept = torch.empty_like(query), []
        sums = query.new_empty((heads, batch, tokens), dtype=exact) if log_sums else None
        for block in blocks:
            here, there = query[:, :, block.queries].flatten(0, 1), key[:, :, block.keys].flatten(0, 1)
            shifted = distance_scores(by_distance[:, :, block.queries], table[:, block.distances], block.offset)
            scores = shifted[..., : there.shape[1]].flatten(0, 1)
            scores = torch.baddbmm(scores, here, there.transpose(1, 2)).unflatten(0, (heads, batch))
            scores.masked_fill_(unseen[..., block.queries, block.keys], -torch.inf)
            shares = scores.softmax(dim=-1, dtype=exact)
            kept.append(shares)
            out[:, :, block.queries] = shares.to(value.dtype) @ value[:, :, block.keys]
            if sums is not None:
                # a share is exp(score - sum): the largest one tells the sum without another exponential of all
                sums[:, :, block.queries] = scores.amax(-1).to(exact) - shares.amax(-1).log()
        ctx.blocks = blocks
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, by_distance, key, value, table, *kept)
        return (out,) if sums is None else (out, sums)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, of_sums: Tensor | None = None) -> tuple[Tensor | None, ...]:
        """Return the gradients of all arguments of `forward`; gradient: [H, B, T, D], of_sums: [H, B, T]."""
        query, by_distance, key, value, table, *kept = ctx.saved_tensors
        gradient = torch.zeros_like(query) if gradient is None else gradient
        of_query, of_by_distance = torch.empty_like(query), torch.empty_like(by_distance)
        # sums over blocks, which BF16 would round again and again
        exact = _exact(query.dtype)
        of_key, of_value, of_table = (torch.zeros_like(x, dtype=exact) for x in (key, value, table))
        for block, shares in zip(ctx.blocks, kept, strict=True):
            own, seen = block.queries, block.keys
            here, out = query[:, :, own], gradient[:, :, own]
            of_shares = (out @ value[:, :, seen].transpose(2, 3)).to(shares.dtype)
            of_value[:, :, seen] += shares.to(value.dtype).transpose(2, 3) @ out
            # scores lie among places of distances that no query reads: see `_shifted`
            products = query.new_zeros(*query.shape[:2], here.shape[2] * (block.distances.stop - block.distances.start))
            scores = _shifted(products, block.offset, here.shape[2])[..., : shares.shape[3]]
            of_scores = torch._softmax_backward_data(of_shares, shares, -1, shares.dtype)
            if of_sums is not None:
                of_scores = of_scores.addcmul_(shares, of_sums[:, :, own, None])
            scores.copy_(of_scores)
            of_query[:, :, own] = scores @ key[:, :, seen]
            of_key[:, :, seen] += scores.transpose(2, 3) @ here
            by_distances = products.view(query.shape[0], -1, block.distances.stop - block.distances.start)
            there = by_distance[:, :, own]
            of_by_distance[:, :, own] = (by_distances @ table[:, block.distances]).view_as(there)
            of_table[:, block.distances] += by_distances.transpose(1, 2) @ there.flatten(1, 2)
        return of_query, of_by_distance, of_key.to(key), of_value.to(value), of_table.to(table), None, None, None
