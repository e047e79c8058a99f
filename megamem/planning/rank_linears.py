"""Linear layers as one of several tensor-parallel ranks holds them, without the others: to count bytes with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from megamem.config.model import ModelConfig
from megamem.errors import LayoutError
from megamem.parallel.linears import Initializer, PlainLinears, SplitRows


def tp_sizes(model: ModelConfig) -> list[int]:
    """Return the tensor-parallel sizes into which everything of `model` divides, in ascending order."""
    # an encoder's layers have a shape of their own
    insides = [model, *map(model.layer_model, range(model.layers))]
    shared = {size for inside in insides for size in (inside.heads, inside.resolved_kv_heads, inside.resolved_ffn_size)}
    shared.add(model.vocabulary_share[1])
    return [size for size in range(1, min(shared) + 1) if not any(whole % size for whole in shared)]


class RankLinears(PlainLinears):
    """The layers of one of `tp_size` ranks.

    They communicate nothing, but take and return tensors of the shapes that they would have with communication: with
    `sequence_parallel`, `enter` makes the tokens of all ranks out of one rank's, and projections back return one
    rank's. Losses keep the tensors that Megatron-Core's keep. Values mean nothing.
    """

    def __init__(self, tp_size: int, sequence_parallel: bool = False) -> None:
        """Remember the layout."""
        self.tp_size = tp_size
        self.sequence_parallel = sequence_parallel and tp_size > 1

    def column(self, inputs: int, outputs: int, init: Initializer, bias: bool = False) -> nn.Module:
        """See `Linears.column`."""
        return super().column(inputs, self._share(outputs, "outputs of a projection"), init, bias)

    def row(self, inputs: int, outputs: int, init: Initializer, bias: bool = False) -> nn.Module:
        """See `Linears.row`."""
        layer = super().row(self._share(inputs, "inputs of a projection"), outputs, init, bias)
        if self.sequence_parallel:
            layer.register_forward_hook(lambda module, args, out: self._own(out))
        return layer

    def embedding(self, vocabulary: int, width: int, init: Initializer) -> nn.Module:
        """See `Linears.embedding`."""
        layer = super().embedding(self._share(vocabulary, "rows of the embedding"), width, init)
        if self.sequence_parallel:
            layer.register_forward_hook(lambda module, args, out: self._own(out))
        return layer

    def rows(self, count: int, width: int, init: Initializer) -> SplitRows:
        """See `Linears.rows`."""
        return super().rows(self._share(count, "rows of a cluster"), width, init)

    def enter(self, x: Tensor) -> Tensor:
        """See `Linears.enter`."""
        return x.repeat(self.tp_size, 1, 1) if self.sequence_parallel else x

    def leave(self, x: Tensor) -> Tensor:
        """See `Linears.leave`; x: [tokens, batch, width]."""
        return self._own(x) if self.sequence_parallel else x

    def join_tokens(self, x: Tensor) -> Tensor:
        """See `Linears.join_tokens`; x: [tokens / ranks, ...] with sequence parallelism."""
        return x.repeat(self.tp_size, 1, 1) if self.sequence_parallel else x

    def split_tokens(self, x: Tensor) -> Tensor:
        """See `Linears.split_tokens`; x: [tokens, ...]."""
        return self._own(x) if self.sequence_parallel else x

    def whole(self, row: nn.Module, x: Tensor) -> Tensor:
        """See `Linears.whole`."""
        return cast(Tensor, row.forward(x))

    def cross_entropies(self, logits: Sequence[Tensor], labels: Sequence[Tensor]) -> list[Tensor]:
        """See `Linears.cross_entropies`; logits: [n, rows / tp_size] each, labels: [n] each."""
        return [_SplitLoss.apply(each, own) for each, own in zip(logits, labels, strict=True)]

    def _own(self, out: Tensor) -> Tensor:
        """Return one rank's tokens: [tokens, batch, hidden] to [tokens / tp_size, batch, hidden]."""
        return out[: out.shape[0] // self.tp_size].clone()

    def _share(self, size: int, what: str) -> int:
        """Return one rank's share of `size`. Raises LayoutError if it does not divide; what: its name there."""
        if size % self.tp_size:
            raise LayoutError(f"parallel.tp: {self.tp_size} ranks cannot share {size} {what} evenly")
        return size // self.tp_size


class _SplitLoss(torch.autograd.Function):
    """A loss that keeps what `megamem.parallel.losses` keeps of one vocabulary: FP32 logits, overwritten twice."""

    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the losses [n], from this rank's logits [n, rows / ranks] alone; labels: [n], int64."""
        logits = logits.float()
        # the maximum of this rank stands for that of all
        logits -= logits.max(-1, keepdim=True).values
        # labels that other ranks have are masked; their logit is read at row 0
        missing = labels >= logits.shape[-1]
        place = labels.masked_fill(missing, 0)[:, None]
        own = logits.gather(-1, place)[:, 0]
        # softmax in place: the same storage is kept for the backward
        shares = logits.exp_()
        total = shares.sum(-1, keepdim=True)
        shares /= total
        ctx.save_for_backward(shares, missing, place)
        return total.squeeze(-1).log() - own

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the logits [n, rows / ranks]. gradient: [n]."""
        shares, missing, place = ctx.saved_tensors  # type: ignore[attr-defined]
        # softmax minus one at the label
        shares.scatter_add_(-1, place, (missing.float() - 1)[:, None])
        return shares.mul_(gradient[:, None]), None
