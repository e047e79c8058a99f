"""What memories that are kept answer: many matrices, or many small networks, per head, and a share of each per query.

Queries [batch, heads, groups, tokens, in], shares [batch, heads, groups, tokens, memories].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

Matrix = Sequence[Tensor]
"""The same matrix of every memory: of each list of memories [memories, in, out]."""


@dataclass(frozen=True)
class Rows:
    """Queries sorted by the memory they are for."""

    counts: list[Tensor]
    """Of each list: how many each of its memories is asked, int64."""

    @cached_property
    def on_host(self) -> list[list[int]]:
        """The same numbers; the host waits for them once."""
        sizes = [len(part) for part in self.counts]
        return [part.tolist() for part in torch.cat(self.counts).cpu().split(sizes)]

    def times(self, x: Tensor, matrix: Matrix) -> Tensor:
        """Rows x [rows, in], each times its own memory's matrix."""
        return self.padded(x, matrix) if x.is_cuda else self.one_by_one(x, matrix)

    def one_by_one(self, x: Tensor, matrix: Matrix) -> Tensor:
        """A product for each memory that is asked."""
        every = [own for part in matrix for own in part.unbind(0)]
        counts = [count for part in self.on_host for count in part]
        asked = [own for own, count in zip(every, counts, strict=True) if count]
        rows_of = x.split([count for count in counts if count])  # empty ones would get gradients too
        return torch.cat([rows @ own for rows, own in zip(rows_of, asked, strict=True)])

    def padded(self, x: Tensor, matrix: Matrix) -> Tensor:
        """A product for each list: its memories are given as many rows as the most asked one of them."""
        rows_of = x.split([sum(part) for part in self.on_host])
        products = []
        for rows, own, counts, (owner, place) in zip(rows_of, matrix, self.on_host, self._places, strict=True):
            spread = rows.new_zeros(len(counts), max(counts), rows.shape[-1]).index_put((owner, place), rows)
            products.append((spread @ own)[owner, place])
        return torch.cat(products)

    @cached_property
    def _places(self) -> list[tuple[Tensor, Tensor]]:
        """Of each list's rows: their memory, and which of its rows they are."""
        found = []
        for counts, hosted in zip(self.counts, self.on_host, strict=True):
            owner = torch.repeat_interleave(counts, output_size=sum(hosted))
            found.append((owner, torch.arange(len(owner), device=owner.device) - (counts.cumsum(0) - counts)[owner]))
        return found


AnswerRows = Callable[[Tensor, Sequence[Matrix], Rows], Tensor]
"""(x [rows, width], the memories' matrices, whose rows they are) -> answers [rows, width]."""


def shared_product(x: Tensor, matrices: Tensor, shares: Tensor) -> Tensor:
    """sum_i shares_i x A_i, one product: A [batch, heads, memories, in, out] stands as one tall matrix."""
    spread = shares[..., :, None] * x[..., None, :]
    return spread.flatten(-2) @ matrices.flatten(2, 3)[:, :, None]


def shared_networks(x: Tensor, up: Tensor, down: Tensor, shares: Tensor) -> Tensor:
    """sum_i shares_i gelu(x U_i^T) D_i; up and down [batch, heads, memories, inner, in or out]."""
    hidden = F.gelu(x @ up.flatten(2, 3).mT[:, :, None]).unflatten(-1, up.shape[2:4])
    return (shares[..., None] * hidden).flatten(-2) @ down.flatten(2, 3)[:, :, None]


def selected_answer(
    answer: AnswerRows, query: Tensor, kept: Sequence[Sequence[Tensor]], shares: Sequence[Tensor]
) -> Tensor:
    """The memories' answers times their shares, computed for the pairs of query and memory whose share is not 0 alone:
    grouped by memory, as experts are. How many there are is read by the host.

    Args:
        query: [batch, heads, groups, tokens, width].
        kept: of each list of memories, the matrices [batch, heads, memories, ...].
        shares: of each list, [batch, heads, groups, tokens, memories].
    """
    # by list, batch row, head and memory, then by query: so `nonzero` finds what each memory is asked in one stretch
    by_memory = [share.movedim(-1, 2) for share in shares]
    chosen = [part.detach() != 0 for part in by_memory]
    pairs = torch.cat([part.flatten() for part in chosen]).nonzero()[:, 0]
    if not len(pairs):
        return kept[0][-1].new_zeros(*query.shape[:-1], kept[0][-1].shape[-1])
    numbers = torch.arange(query[..., 0].numel(), device=query.device).view(*query.shape[:2], 1, *query.shape[2:4])
    of_query = torch.cat([numbers.expand_as(part).flatten() for part in by_memory])[pairs]
    share = torch.cat([part.flatten() for part in by_memory]).index_select(0, pairs)
    rows = Rows([part.sum((-2, -1)).flatten() for part in chosen])
    matrices = [[matrix.flatten(0, 2) for matrix in lists] for lists in zip(*kept, strict=True)]
    queries = query.flatten(0, -2)
    weighted = share[:, None] * answer(queries.index_select(0, of_query), matrices, rows)
    out = weighted.new_zeros(len(queries), weighted.shape[-1]).index_add(0, of_query, weighted)
    return out.unflatten(0, query.shape[:-1])
