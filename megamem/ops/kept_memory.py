"""What memories that are kept answer: many matrices, or many small networks, per head, and a share of each per query.

Queries [batch, heads, groups, tokens, in], shares [batch, heads, groups, tokens, memories].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

Owners = list[int]
"""How many rows each memory is asked: the first so many rows are the first one's, and so on."""
Lists = Sequence[Tensor]
"""One of the matrices of all memories, [memories, ...] of each list of them."""
Asked = Callable[[Tensor, Sequence[Lists], Owners], Tensor]
"""(rows [rows, width], each of the memories' matrices, whose rows they are) -> answers [rows, width]."""


def shared_product(x: Tensor, matrices: Tensor, shares: Tensor) -> Tensor:
    """sum_i shares_i x A_i, one product: A [batch, heads, memories, in, out] stands as one tall matrix."""
    spread = shares[..., :, None] * x[..., None, :]
    return spread.flatten(-2) @ matrices.flatten(2, 3)[:, :, None]


def shared_networks(x: Tensor, up: Tensor, down: Tensor, shares: Tensor) -> Tensor:
    """sum_i shares_i gelu(x U_i^T) D_i; up and down [batch, heads, memories, inner, in or out]."""
    hidden = F.gelu(x @ up.flatten(2, 3).mT[:, :, None]).unflatten(-1, up.shape[2:4])
    return (shares[..., None] * hidden).flatten(-2) @ down.flatten(2, 3)[:, :, None]


def grouped_product(x: Tensor, matrices: Lists, owners: Owners) -> Tensor:
    """Rows x [rows, in], each times the matrix of its owner: lists of memories [memories, in, out], one by one."""
    if not x.is_cuda:
        every = (matrix for part in matrices for matrix in part.unbind(0))
        return torch.cat([rows @ matrix for rows, matrix in zip(x.split(owners), every, strict=True) if len(rows)])
    ends = list(accumulate(map(len, matrices)))
    owners_of = [owners[end - len(part) : end] for part, end in zip(matrices, ends, strict=True)]
    rows_of = x.split([sum(own) for own in owners_of])
    return torch.cat([padded_product(*given) for given in zip(rows_of, matrices, owners_of, strict=True)])


def padded_product(x: Tensor, matrices: Tensor, owners: Owners) -> Tensor:
    """`grouped_product` of one list in one launch: each memory is given as many rows as the most asked one."""
    counts = torch.tensor(owners, device=x.device)
    owner = torch.repeat_interleave(counts, output_size=len(x))
    place = torch.arange(len(x), device=x.device) - (counts.cumsum(0) - counts)[owner]
    rows = x.new_zeros(len(owners), max(owners), x.shape[-1]).index_put((owner, place), x)
    return (rows @ matrices)[owner, place]


def selected_answer(answer: Asked, query: Tensor, kept: Sequence[Sequence[Tensor]], shares: Sequence[Tensor]) -> Tensor:
    """The memories' answers times their shares, computed for the pairs of query and memory whose share is not 0 alone:
    grouped by memory, as experts are. How many there are is read by the host.

    Args:
        query: [batch, heads, groups, tokens, width].
        kept: of each list of memories, the matrices [batch, heads, memories, ...].
        shares: of each list, [batch, heads, groups, tokens, memories].
    """
    rows = torch.arange(query[..., 0].numel(), device=query.device).view(*query.shape[:2], 1, *query.shape[2:4])
    # by list, batch row, head and memory, then by query: nonzero finds what each memory is asked one after the other
    by_memory = [share.movedim(-1, 2) for share in shares]
    chosen = [part.detach() != 0 for part in by_memory]
    owners = torch.cat([part.sum((-2, -1)).flatten() for part in chosen]).tolist()
    pairs = torch.cat([part.flatten() for part in chosen]).nonzero()[:, 0]
    if not len(pairs):
        return kept[0][-1].new_zeros(*query.shape[:-1], kept[0][-1].shape[-1])
    asked = torch.cat([rows.expand_as(part).flatten() for part in by_memory])[pairs]
    share = torch.cat([part.flatten() for part in by_memory]).index_select(0, pairs)
    matrices = [[matrix.flatten(0, 2) for matrix in lists] for lists in zip(*kept, strict=True)]
    queries = query.flatten(0, -2)
    weighted = share[:, None] * answer(queries.index_select(0, asked), matrices, owners)
    out = weighted.new_zeros(len(queries), weighted.shape[-1]).index_add(0, asked, weighted)
    return out.unflatten(0, query.shape[:-1])
