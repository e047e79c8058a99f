"""What a few of many kept networks answer together, chosen by the shares of each query: for kernels.

`selected_answer` of `kept.py` computes the same by torch, for any memory, and waits for the device to learn how many
queries chose each memory. Here that number stays on the device: a query reads at most K networks, so there is room for
K pairs of each, in the order of the networks; what is not used comes last. Networks lie in lists, of which each goes
through kernels of its own.

Letters of shapes: B batch rows, H key/value heads, G query heads that share one of them, T tokens, R = T G rows of
queries, N kept networks of all lists, n of one of them, K networks that a row reads at most, P = R K pairs, D width of
a head, I inner width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Lists = Sequence[Sequence[Tensor]]
"""For each list of networks their matrices U and V, [B, H, n, I, D], as in `kept_networks.py`."""


class Pairs(NamedTuple):
    """Pairs of a row and a network that it reads, in the order of the networks."""

    order: Tensor
    """[B, H, P] int32: the row times K, plus which of the row's networks it is."""
    begins: Tensor
    """Where those of each network begin, and where those of the last one end, [B, H, N + 1] int32."""


class SelectedPasses(NamedTuple):
    """Both passes of selected networks by kernels."""

    answer: Callable[..., Tensor]
    """(rows [B, H, R, D], shares [B, H, R, N], pairs, eps, lists) -> what each pair adds, [B, H, R, K, D]"""
    gradients: Callable[..., tuple[Tensor, Tensor, Lists]]
    """(that of the sum [B, H, R, D], and the same) -> of rows by pair [B, H, R, K, D], of shares, of the lists"""


def pairs_of(shares: Tensor, most: int) -> Pairs:
    """Return the pairs of rows and networks whose share is not zero.

    shares: [B, H, R, N], of which each row has at most `most` that are not zero.
    """
    count = shares.shape[-1]
    share, network = shares.detach().abs().topk(min(most, count), dim=-1)
    # what is not read stands behind the last network
    owners = torch.where(share != 0, network, count).flatten(2)
    sorted_owners, order = owners.sort(dim=-1, stable=True)
    numbers = torch.arange(count + 1, device=shares.device).expand(*shares.shape[:2], -1).contiguous()
    return Pairs(order.int(), torch.searchsorted(sorted_owners, numbers).int())


def selected_networks(
    query: Tensor, lists: Lists, shares: Tensor, most: int, eps: float | None, passes: SelectedPasses
) -> Tensor:
    """Return the sum of what the networks of shares that are not zero answer, times the shares.

    Args:
        query: [B, H, G, T, D], in the dtype of the products.
        shares: w of all lists, one behind the other, [B, H, G, T, N], whose dtype the answer has.
        most: how many of a query's shares are not zero at most.
        eps: the number added to the layer norm's variance; None: there is no norm.
        passes: what computes it, and goes back through it.
    Returns: y [B, H, G, T, D].
    """
    groups = query.shape[2]
    rows, shares = (x.movedim(2, 3).flatten(2, 3) for x in (query, shares))
    matrices = [matrix for each in lists for matrix in each]
    made: Tensor = _Selected.apply(passes, rows, shares, pairs_of(shares, most), eps, len(lists), *matrices)
    return made.unflatten(2, (-1, groups)).movedim(3, 2)


class _Selected(torch.autograd.Function):
    """The sum over the networks that a row reads; its backward pass computes everything but the inputs anew."""

    @staticmethod
    def forward(
        ctx: Any, passes: SelectedPasses, rows: Tensor, shares: Tensor, pairs: Pairs, eps: float | None, lists: int,
        *matrices: Tensor,
    ) -> Tensor:  # fmt: skip
        """Return y [B, H, R, D]; arguments as in `SelectedPasses`."""
        ctx.passes, ctx.eps, ctx.lists = passes, eps, lists
        ctx.save_for_backward(rows, shares, *pairs, *matrices)
        return passes.answer(rows, shares, pairs, eps, _in_lists(matrices, lists)).sum(3)

    @staticmethod
    def backward(ctx: Any, of_total: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of rows, shares and matrices, from that of y [B, H, R, D]."""
        rows, shares, order, begins, *matrices = ctx.saved_tensors
        of_parts, of_shares, of_lists = ctx.passes.gradients(
            of_total, rows, shares, Pairs(order, begins), ctx.eps, _in_lists(matrices, ctx.lists)
        )
        of_matrices = [of_matrix for each in of_lists for of_matrix in each]
        return None, of_parts.sum(3).to(rows.dtype), of_shares, None, None, None, *of_matrices


def _in_lists(matrices: Sequence[Tensor], lists: int) -> Lists:
    """Return matrices [B, H, n, I, D] list by list."""
    each = len(matrices) // lists
    return [matrices[i * each : (i + 1) * each] for i in range(lists)]
