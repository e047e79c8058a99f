"""What memories that are kept answer: many matrices, or many small networks, per head, and a share of each per query.

Queries [batch, heads, groups, tokens, in], shares [batch, heads, groups, tokens, memories].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Owners = list[int]
"""How many rows each memory is asked: the first so many rows are the first one's, and so on."""
Asked = Callable[[Tensor, Sequence[Tensor], Owners], Tensor]
"""(rows [rows, width], matrices of the memories [memories, ...], whose rows they are) -> answers [rows, width]."""


def shared_product(x: Tensor, matrices: Tensor, shares: Tensor) -> Tensor:
    """sum_i shares_i x A_i, one product: A [batch, heads, memories, in, out] stands as one tall matrix."""
    spread = shares[..., :, None] * x[..., None, :]
    return spread.flatten(-2) @ matrices.flatten(2, 3)[:, :, None]


def shared_networks(x: Tensor, up: Tensor, down: Tensor, shares: Tensor) -> Tensor:
    """sum_i shares_i gelu(x U_i^T) D_i; up and down [batch, heads, memories, inner, in or out]."""
    hidden = F.gelu(x @ up.flatten(2, 3).mT[:, :, None]).unflatten(-1, up.shape[2:4])
    return (shares[..., None] * hidden).flatten(-2) @ down.flatten(2, 3)[:, :, None]


def grouped_product(x: Tensor, matrices: Tensor, owners: Owners) -> Tensor:
    """Rows x [rows, in], each times the matrix of its owner [memories, in, out]."""
    if not x.is_cuda:
        pairs = zip(x.split(owners), matrices.unbind(0), strict=True)
        return torch.cat([rows @ matrix for rows, matrix in pairs if len(rows)])
    return padded_product(x, matrices, owners)


def padded_product(x: Tensor, matrices: Tensor, owners: Owners) -> Tensor:
    """`grouped_product` in one launch: each memory is given as many rows as the most asked one."""
    counts = torch.tensor(owners, device=x.device)
    owner = torch.repeat_interleave(counts, output_size=len(x))
    place = torch.arange(len(x), device=x.device) - (counts.cumsum(0) - counts)[owner]
    rows = x.new_zeros(len(owners), max(owners), x.shape[-1]).index_put((owner, place), x)
    return (rows @ matrices)[owner, place]


def selected_answer(answer: Asked, query: Tensor, kept: Sequence[Tensor], shares: Tensor) -> Tensor:
    """The memories' answers times their shares, computed for the pairs of query and memory whose share is not 0 alone:
    grouped by memory, as experts are. How many there are is read by the host.

    Args:
        query: [batch, heads, groups, tokens, width].
        kept: matrices of the memories [batch, heads, memories, ...].
        shares: [batch, heads, groups, tokens, memories].
    """
    by_memory = shares.movedim(-1, 2)
    chosen = by_memory.detach() != 0
    owners = chosen.sum((-2, -1)).flatten().tolist()
    pairs = chosen.flatten().nonzero()[:, 0]
    queries = query.flatten(0, -2)
    if not len(pairs):
        return kept[-1].new_zeros(*query.shape[:-1], kept[-1].shape[-1])
    asked_of_head = chosen[0, 0, 0].numel()
    asked = pairs // (shares.shape[-1] * asked_of_head) * asked_of_head + pairs % asked_of_head
    answers = answer(queries.index_select(0, asked), [matrices.flatten(0, 2) for matrices in kept], owners)
    weighted = by_memory.flatten().index_select(0, pairs)[:, None] * answers
    out = answers.new_zeros(len(queries), answers.shape[-1]).index_add(0, asked, weighted)
    return out.unflatten(0, query.shape[:-1])
