"""What memories that are kept answer: many matrices, or many small networks, per head, and a share of each per query.

Queries [batch, heads, groups, tokens, in], shares [batch, heads, groups, tokens, memories].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Answer = Callable[[Tensor, Sequence[Tensor], Tensor], Tensor]
"""(queries, matrices of memories, shares) -> the sum of what the memories answer, weighted."""


def shared_product(x: Tensor, matrices: Tensor, shares: Tensor) -> Tensor:
    """sum_i shares_i x A_i, one product: A [batch, heads, memories, in, out] stands as one tall matrix."""
    spread = shares[..., :, None] * x[..., None, :]
    return spread.flatten(-2) @ matrices.flatten(2, 3)[:, :, None]


def shared_networks(x: Tensor, up: Tensor, down: Tensor, shares: Tensor) -> Tensor:
    """sum_i shares_i gelu(x U_i^T) D_i; up and down [batch, heads, memories, inner, in or out]."""
    hidden = F.gelu(x @ up.flatten(2, 3).mT[:, :, None]).unflatten(-1, up.shape[2:4])
    return (shares[..., None] * hidden).flatten(-2) @ down.flatten(2, 3)[:, :, None]


def selected_answer(answer: Answer, query: Tensor, kept: Sequence[Tensor], shares: Tensor, chosen: Tensor) -> Tensor:
    """What `answer` gives, computed for the chosen pairs of query and memory alone: grouped by memory, as experts are.

    Args:
        query: [batch, heads, groups, tokens, width].
        kept: matrices of the memories [batch, heads, memories, ...].
        shares: [batch, heads, groups, tokens, memories], 0 where `chosen`, of the same shape, is False.
    Each memory is given as many rows as the most chosen one needs: their number is read by the host.
    """
    batch, heads, groups, tokens, memories = shares.shape
    of_batch, of_head, of_group, of_token, of_memory = chosen.nonzero(as_tuple=True)
    if not len(of_batch):  # shares are zeros
        return answer(query, [matrices[:, :, :1] for matrices in kept], shares[..., :1])
    owner = (of_batch * heads + of_head) * memories + of_memory
    owner, order = owner.sort(stable=True)
    counts = torch.bincount(owner, minlength=batch * heads * memories)
    place = torch.arange(len(owner), device=owner.device) - (counts.cumsum(0) - counts)[owner]
    asked = (of_batch[order], of_head[order], of_group[order], of_token[order])
    rows = int(counts.max())
    packed = query.new_zeros(len(counts), rows, query.shape[-1]).index_put((owner, place), query[asked])
    share = shares.new_zeros(len(counts), rows).index_put((owner, place), shares[(*asked, of_memory[order])])
    alone = [matrices.flatten(0, 2)[:, None, None] for matrices in kept]
    answers = answer(packed[:, None, None], alone, share[:, None, None, :, None])[:, 0, 0]
    flat = ((asked[0] * heads + asked[1]) * groups + asked[2]) * tokens + asked[3]
    out = answers.new_zeros(batch * heads * groups * tokens, answers.shape[-1])
    return out.index_add(0, flat, answers[owner, place]).view(batch, heads, groups, tokens, -1)
