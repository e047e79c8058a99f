"""Reading many memories at once: what kept matrices, or kept small networks, answer to queries that weigh them.

Letters of shapes: B batch rows, H key/value heads, G query heads that share one of them, T tokens, N kept memories, D
width of a head. Each query has a share (a weight, 0 for memories it does not read) for each memory: [B, H, G, T, N].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

Matrix = Sequence[Tensor]
"""The same matrix of every memory, as lists of memories: [memories, in, out] for each list."""


@dataclass(frozen=True)
class Rows:
    """Which memory each of some queries reads; the queries stand in the order of their memories."""

    counts: list[Tensor]
    """How many queries each memory has, [memories] int64 for each list of memories."""
    known: list[list[int]] | None = None
    """The counts as host integers, where they are known already."""

    @cached_property
    def on_host(self) -> list[list[int]]:
        """The counts as host integers; the host waits for them once."""
        if self.known is not None:
            return self.known
        sizes = [len(part) for part in self.counts]
        return [part.tolist() for part in torch.cat(self.counts).cpu().split(sizes)]

    def times(self, x: Tensor, matrix: Matrix) -> Tensor:
        """Multiply each row of x [rows, in] by its own memory's matrix: [rows, out]."""
        return self.padded(x, matrix) if x.is_cuda else self.one_by_one(x, matrix)

    def one_by_one(self, x: Tensor, matrix: Matrix) -> Tensor:
        """See `times` ([rows, in] -> [rows, out]); one product for each memory that has queries."""
        every = [own for part in matrix for own in part.unbind(0)]
        counts = [count for part in self.on_host for count in part]
        # memories without queries are left out: autograd would give them gradients too
        read = [own for own, count in zip(every, counts, strict=True) if count]
        rows_of = x.split([count for count in counts if count])
        return torch.cat([rows @ own for rows, own in zip(rows_of, read, strict=True)])

    def padded(self, x: Tensor, matrix: Matrix) -> Tensor:
        """See `times` ([rows, in] -> [rows, out]); one batched product for each list.

        Every memory of a list is given as many rows as that of its memories with the most queries.
        """
        rows_of = x.split([sum(part) for part in self.on_host])
        products = []
        for rows, own, counts, (owner, place) in zip(rows_of, matrix, self.on_host, self._places, strict=True):
            spread = rows.new_zeros(len(counts), max(counts), rows.shape[-1]).index_put((owner, place), rows)
            products.append((spread @ own)[owner, place])
        return torch.cat(products)

    @cached_property
    def _places(self) -> list[tuple[Tensor, Tensor]]:
        """The index of each row's memory in its list, and the row's index among that memory's rows."""
        found = []
        for counts, hosted in zip(self.counts, self.on_host, strict=True):
            owner = torch.repeat_interleave(counts, output_size=sum(hosted))
            found.append((owner, torch.arange(len(owner), device=owner.device) - (counts.cumsum(0) - counts)[owner]))
        return found


AnswerRows = Callable[[Tensor, Sequence[Matrix], Rows], Tensor]
"""(x [rows, D], the memories' matrices, which memory each row reads) -> answers [rows, V]."""


def shared_product(x: Tensor, matrices: Tensor, shares: Tensor) -> Tensor:
    """Return sum_n shares_n x A_n in one product.

    The matrices stand upon each other as one tall matrix, and x is repeated beside itself, times the shares.

    Args:
        x: [B, H, G, T, in].
        matrices: A [B, H, N, in, out].
        shares: [B, H, G, T, N].
    Returns: [B, H, G, T, out].
    """
    spread = shares[..., :, None] * x[..., None, :]
    return spread.flatten(-2) @ matrices.flatten(2, 3)[:, :, None]


class Copies:
    """Copies of memories that lie elsewhere, on the device of the queries that read them; each is made once."""

    def __init__(self) -> None:
        # by the tensor and the number of a memory in it; the tensor is held, so that no other gets its identity
        self._made: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def fetched(
        self, kept: Sequence[Sequence[Tensor]], rows: Rows, far: Sequence[bool], device: torch.device
    ) -> tuple[list[list[Tensor]], Rows]:
        """Copy the memories that queries read, each straight from where it lies.

        Args:
            kept: for each list of memories, the matrices [B, H, N, ...].
            rows: which memory each query reads.
            far: for each list, whether it is fetched; the others are read where they are.
            device: that of the queries.
        Returns: the matrices as lists of memories, only those that are read of what is fetched; which each query reads.
        """
        found: list[list[Tensor]] = [[] for _ in kept[0]]
        counts, known = [], []
        for matrices, away, count, on_host in zip(kept, far, rows.counts, rows.on_host, strict=True):
            read = [n for n, queries in enumerate(on_host) if queries]
            if away and not read:
                continue
            for lists, matrix in zip(found, matrices, strict=True):
                copies = [self._copy(matrix, n, device) for n in read] if away else []
                lists.append(torch.stack(copies) if away else matrix.flatten(0, 2))
            known.append([on_host[n] for n in read] if away else on_host)
            counts.append(torch.as_tensor(known[-1], device=device) if away else count)
        return found, Rows(counts, known)

    def _copy(self, matrix: Tensor, memory: int, device: torch.device) -> Tensor:
        """Return the matrix of one memory of those in [B, H, N, ...], counted through, on a device."""
        key = id(matrix), memory
        if key not in self._made:
            self._made[key] = matrix, matrix.flatten(0, 2)[memory].to(device, non_blocking=True)
        return self._made[key][1]


def selected_answer(
    answer: AnswerRows,
    query: Tensor,
    kept: Sequence[Sequence[Tensor]],
    shares: Sequence[Tensor],
    width: int,
    copies: Copies | None = None,
    far: Sequence[bool] = (),
) -> Tensor:
    """Return the sum of the memories' answers times their shares, computing no answer whose share is 0.

    Pairs of query and memory are grouped by memory, as tokens of a mixture of experts are by expert. The host reads how
    many there are.

    Args:
        answer: what a memory answers.
        query: [B, H, G, T, D].
        kept: for each list of memories, the matrices [B, H, N, ...].
        shares: for each list, [B, H, G, T, N].
        width: V, that of an answer.
        copies: those made so far, if memories may lie elsewhere than the queries.
        far: for each list, whether its memories do.
    Returns: [B, H, G, T, V].
    """
    # sorted by list, batch row, head and memory, then by query: `nonzero` finds the queries of a memory in one stretch
    by_memory = [share.movedim(-1, 2) for share in shares]
    chosen = [part.detach() != 0 for part in by_memory]
    pairs = torch.cat([part.flatten() for part in chosen]).nonzero()[:, 0]
    if not len(pairs):
        return kept[0][-1].new_zeros(*query.shape[:-1], width)
    # the query and the share of each pair; a query's number counts through [B, H, G, T]
    numbers = torch.arange(query[..., 0].numel(), device=query.device).view(*query.shape[:2], 1, *query.shape[2:4])
    of_query = torch.cat([numbers.expand_as(part).flatten() for part in by_memory])[pairs]
    share = torch.cat([part.flatten() for part in by_memory]).index_select(0, pairs)
    rows = Rows([part.sum((-2, -1)).flatten() for part in chosen])
    if copies is None:
        matrices = [[matrix.flatten(0, 2) for matrix in lists] for lists in zip(*kept, strict=True)]
    else:
        matrices, rows = copies.fetched(kept, rows, far, query.device)
    queries = query.flatten(0, -2)
    weighted = share[:, None] * answer(queries.index_select(0, of_query), matrices, rows)
    # a query adds up the answers of all its pairs
    out = weighted.new_zeros(len(queries), weighted.shape[-1]).index_add(0, of_query, weighted)
    return out.unflatten(0, query.shape[:-1])
