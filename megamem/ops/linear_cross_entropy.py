"""The product of an output head and the cross-entropy behind it, in slices of tokens.

The logits of all tokens together are the largest tensor of a training step: 4,096 tokens and a vocabulary of 32,768
make 512 MiB of them in FP32 for each row. Here those of one slice are made at a time, and all that is kept of them are
four numbers for each token x with label y. Its loss follows from two of them:

    log sum      s = log sum_v exp(w_v x)            loss = s - l
    label logit  l = w_y x

The others are the largest logit m and the sum of exp(w_v x - m), so that the backward pass has exp(w_v x - s) bit for
bit as if all exponentials had been kept. It makes a slice's logits again, and from the gradients ds and dl of s and l

    d logits_v = ds exp(w_v x - s) + dl [v = y],    dx = sum_v d logits_v w_v,    dw_v = sum over tokens of d logits_v x

Gradients are not made in the forward pass, as Liger-Kernel makes them (Hsu et al. 2024): dw sums over tokens what the
two gradients of each of them weigh, which are not known by then. They differ from token to token (labels that are
ignored), a z-loss has them depend on s, and dw would be kept in FP32 from each chunk's forward pass to its backward.
The fourth product is what this costs. Where all tokens fit into one slice nothing is computed twice.

Each tensor-parallel rank calls this with its own rows of the vocabulary. The log sums of ranks r make
s = log sum_r exp(s_r), and the label logits, which are 0 on all ranks but one, their sum: two numbers a token go over
ranks, once for all slices, and the gradient exp(s_r - s) ds of s_r is all that a rank's backward pass needs of the
others.

Letters: N tokens, n those of a slice, D hidden_size, V rows of this rank, W those of them that stand for a word.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

SLICE_BYTES = 2**28
"""The most bytes that the FP32 logits of a slice take: 2,048 tokens with a vocabulary of 32,768. Each slice reads and
writes the whole sum of the weight's gradient, so that smaller ones take longer; much smaller ones save little, since
that sum is the largest tensor then (docs/performance.md has both)."""


def slice_count(tokens: int, rows: int) -> int:
    """Return the slices in which so many tokens are scored against so many rows of a vocabulary: a power of two.

    Chunks have round numbers of tokens, which it cuts evenly.
    """
    slices = 1
    while slices < tokens and 4 * tokens * rows > slices * SLICE_BYTES:
        slices *= 2
    return slices


def label_scores(
    x: Tensor, weight: Tensor, labels: Tensor, words: int, slices: int = 1, keep: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the log sums s [N] and the label logits l [N] of this rank's rows, in float32 (float64 where x is).

    Args:
        x: what the head reads, [N, D].
        weight: this rank's rows [V, D], in the dtype of x.
        labels: [N] int64, rows of this rank counted from 0; any other number for a label that another rank has. Its
            logit counts as 0 here.
        words: W, the rows that stand for words, which come first: the others only fill up the ranks' shares. Where
            there are none the log sums are -inf.
        slices: into how many nearly equal parts the tokens are cut.
        keep: whether a single slice keeps its exponentials for the backward pass, which computes them again otherwise.
    """
    log_sums, label_logits = _LabelScores.apply(x, weight, labels, words, slices, keep)
    return log_sums, label_logits


@torch.no_grad()
def label_scores_and_best(
    x: Tensor, weight: Tensor, labels: Tensor, words: int, slices: int = 1
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return `label_scores`, the largest logit [N] of this rank's words and the first row [N] int64 that has it.

    For evaluation: there are no gradients. A rank without words has -inf and row 0. Arguments: see `label_scores`.
    """
    found: list[tuple[Tensor, ...]] = []
    for part, own in zip(x.tensor_split(slices), labels.tensor_split(slices), strict=True):
        logits = _logits(part, weight)
        if words:
            best = logits[:, :words].max(-1)
            largest, row = best.values, best.indices
        else:
            largest, row = logits.new_full((len(part),), -torch.inf), torch.zeros_like(own)
        log_sums, label_logits, *_ = _reduced(logits, own, words)
        found.append((log_sums, label_logits, largest, row))
    log_sums, label_logits, largest, row = map(torch.cat, zip(*found, strict=True))
    return log_sums, label_logits, largest, row


def _logits(x: Tensor, weight: Tensor) -> Tensor:
    """Return the logits [n, V] of x [n, D] in float32, or in float64."""
    logits = x @ weight.mT
    return logits if logits.dtype == torch.float64 else logits.float()


def _places(labels: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return the row of each label, 0 for those of other ranks, [n, 1] int64, and which these are, [n] bool.

    labels: [n] int64; rows: V, those of logits [n, V].
    """
    missing = (labels < 0) | (labels >= rows)
    return labels.masked_fill(missing, 0)[:, None], missing


def _reduced(logits: Tensor, labels: Tensor, words: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log sums and label logits of logits [n, V], their largest, and the sums of exponentials; [n] each.

    The logits of words are overwritten by exponentials, of which the largest of each token is 1. labels: [n] int64.
    """
    place, missing = _places(labels, logits.shape[-1])
    label_logits = logits.gather(-1, place)[:, 0].masked_fill(missing, 0.0)
    if not words:
        nothing = torch.full_like(label_logits, -torch.inf)
        return nothing, label_logits, torch.zeros_like(nothing), torch.ones_like(nothing)
    own = logits[:, :words]
    largest = own.amax(-1, keepdim=True)
    sums = own.sub_(largest).exp_().sum(-1)
    return largest[:, 0] + sums.log(), label_logits, largest[:, 0], sums


class _LabelScores(torch.autograd.Function):
    """See `label_scores`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, words: int, slices: int, keep: bool
    ) -> tuple[Tensor, Tensor]:
        """Return log sums and label logits, [N] each; x: [N, D], weight: [V, D], labels: [N]."""
        found: list[tuple[Tensor, ...]] = []
        exponentials: Tensor | None = None
        for part, own in zip(x.tensor_split(slices), labels.tensor_split(slices), strict=True):
            logits = _logits(part, weight)
            found.append(_reduced(logits, own, words))
            if keep and slices == 1:
                exponentials = logits
            del logits  # before the next slice has its own
        log_sums, label_logits, largest, sums = map(torch.cat, zip(*found, strict=True))
        ctx.save_for_backward(x, weight, labels, largest, sums, exponentials)
        ctx.words, ctx.slices = words, slices
        return log_sums, label_logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_log_sums: Tensor, of_label_logits: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x [N, D] and weight [V, D], from those of log sums and label logits, [N] each."""
        x, weight, labels, largest, sums, exponentials = ctx.saved_tensors
        of_x = x.new_empty(x.shape) if ctx.needs_input_grad[0] else None
        of_weight: Tensor | None = None
        cut = (each.tensor_split(ctx.slices) for each in (x, labels, largest, of_log_sums / sums, of_label_logits))
        begin = 0
        for part, own, own_largest, of_sum, of_label in zip(*cut, strict=True):
            if exponentials is None:  # the same ones again, bit for bit
                gradient = _logits(part, weight).sub_(own_largest[:, None]).exp_().mul_(of_sum[:, None])
            else:  # not in place: another backward pass may follow
                gradient = exponentials * of_sum[:, None]
            gradient[:, ctx.words :] = 0.0
            place, missing = _places(own, len(weight))
            gradient.scatter_add_(-1, place, of_label.masked_fill(missing, 0.0)[:, None])
            gradient = gradient.to(weight.dtype)
            if of_x is not None:
                torch.mm(gradient, weight, out=of_x[begin : begin + len(part)])
            if ctx.needs_input_grad[1]:
                of_weight = _sum_with(of_weight, gradient.mT, part, alone=ctx.slices == 1)
            begin += len(part)
            del gradient  # before the next slice has its own
        return of_x, None if of_weight is None else of_weight.to(weight.dtype), None, None, None, None


def _sum_with(total: Tensor | None, left: Tensor, right: Tensor, alone: bool) -> Tensor:
    """Return total [V, D], if there is one, plus left [V, n] times right [n, D]: in place, and summed in FP32.

    alone: whether this is the only product; it sums in FP32 itself.
    """
    if total is None:
        product = left @ right
        return product if alone or product.dtype == torch.float64 else product.float()
    if total.dtype == left.dtype:
        return torch.addmm(total, left, right, out=total)
    return total.add_(left @ right)
