"""Cross-entropies of several vocabularies that tensor-parallel ranks share, with two collectives for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup


class _CrossEntropies(torch.autograd.Function):
    """Losses of all vocabularies side by side; like Megatron-Core's it keeps the softmax in place of the logits.

    Letters: n tokens of one vocabulary, N those of all, V rows of one vocabulary on this rank.
    """

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, labels: Sequence[Tensor], *logits: Tensor) -> Tensor:
        """Return the losses [N]. labels: [n] int64 of each vocabulary; logits: [n, V] of each, overwritten."""
        full = [each if each.dtype == torch.float64 else each.float() for each in logits]
        sizes = [len(each) for each in full]
        largest = torch.cat([each.detach().amax(-1) for each in full])
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        sums, own, places = [], [], []
        for each, label, most in zip(full, labels, largest.split(sizes), strict=True):
            each -= most[:, None]
            # the label's row on this rank, and whether another rank has it: then row 0 stands in, and counts nothing
            place = label - group.rank() * each.shape[-1]
            missing = (place < 0) | (place >= each.shape[-1])
            place = place.masked_fill(missing, 0)[:, None]
            own.append(each.gather(-1, place)[:, 0].masked_fill(missing, 0.0))
            places.append((place, missing))
            sums.append(each.exp_().sum(-1))
        over_ranks = torch.stack((torch.cat(sums), torch.cat(own)))
        dist.all_reduce(over_ranks, group=group)
        total, label_logits = over_ranks
        for each, part in zip(full, total.split(sizes), strict=True):
            each /= part[:, None]
        ctx.save_for_backward(*full)
        ctx.places, ctx.sizes, ctx.dtypes = places, sizes, [each.dtype for each in logits]
        return total.log() - label_logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the logits, [n, V] each. gradient: [N]."""
        gradients = []
        parts = gradient.split(ctx.sizes)
        for shares, (place, missing), part, dtype in zip(ctx.saved_tensors, ctx.places, parts, ctx.dtypes, strict=True):
            # softmax minus one at the label, in the place of the softmax
            logits = shares.detach().scatter_add_(-1, place, (missing.to(shares.dtype) - 1)[:, None])
            gradients.append(logits.mul_(part[:, None]).to(dtype))
        return None, None, *gradients


def cross_entropies(logits: Sequence[Tensor], labels: Sequence[Tensor], group: ProcessGroup) -> list[Tensor]:
    """Return the losses [n] of each vocabulary in nats; see `megamem.parallel.linears.Linears.cross_entropies`.

    Args:
        logits: of each vocabulary, this rank's [n, rows / ranks]; overwritten where they need no copy in FP32.
        labels: of each vocabulary [n] int64, among the rows of all ranks.
        group: the ranks that share every vocabulary.
    """
    losses: Tensor = _CrossEntropies.apply(group, labels, *logits)
    return list(losses.split([len(each) for each in logits]))
