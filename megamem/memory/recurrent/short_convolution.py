"""The short convolutions of queries, keys and values of recurrent memories, over chunks and borders of documents."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megamem.memory.base import Chunk, to_device
from megamem.memory.shared.blocks import first_tokens
from megamem.ops.short_convolution import convolved, short_convolution
from megamem.parallel.linears import Linears, declare, normal


class ShortConvolution(nn.Module):
    """SiLU(sum_j w_j x_{t-j}) in each channel over the last `taps` tokens, zeros before a document's first."""

    def __init__(self, heads: int, width: int, taps: int, linears: Linears) -> None:
        super().__init__()
        self.width, self.taps = width, taps
        channels = heads * width // linears.tp_size
        # each output starts with the variance of its inputs
        self.weight = declare(nn.Parameter(torch.empty(channels, taps)), normal(taps**-0.5), 0, fan_in=1)
        self.function = short_convolution

    def forward(self, x: Tensor, before: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Convolve x [T, B, heads, width], which follows `before` [taps - 1, B, heads, width] and lies at `chunk`.

        Returns: like x; the last taps - 1 tokens of both, which the next call needs.
        """
        tokens, taps = x.shape[0], self.taps
        weight = self.weight.unflatten(0, x.shape[-2:])
        joined = torch.cat((before, x))
        if not chunk.begins_inside:
            return self.function(joined, weight)
        out, after = convolved(joined, weight)
        # what lies before a document counts as zero: its first tokens are computed again
        at, rows, ages = first_tokens(chunk, tokens, taps - 1, x.device)
        own = [(ages >= taps - 1 - tap)[:, None, None] for tap in range(taps)]
        terms = [torch.where(own[tap], weight[..., tap] * joined[at + tap, rows], 0) for tap in range(taps)]
        out = out.index_put((at, rows), torch.stack(terms).sum(0))
        lags = torch.arange(taps - 1, 0, -1, device=x.device)[:, None]
        kept = lags <= to_device(chunk.after(tokens).starts, x.device)
        return F.silu(out), torch.where(kept[..., None, None], after, 0)
