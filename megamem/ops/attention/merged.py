"""Attention over several key parts by one fused kernel call each, merged exactly through the log-sum-exp.

torch's fused CPU kernel knows a causal mask only for as many keys as queries; with memory tokens in front, it would
fall back to a full rectangular mask. One causal call for the own keys and one unmasked call per past part do no
wasted work. Softmax parts merge as out = sum_p exp(lse_p - lse) out_p with lse = logsumexp_p lse_p; and the kernel's
backward, given the merged `out` and `lse`, recomputes exactly the merged probabilities of its own part.

Where several query heads share keys and values, a part that every query sees whole is not repeated for them: the heads
of a group are read as further queries. Repeated keys of a long past would cost most of the time of writing a token.

Letters of shapes: B batch rows, H query heads, G key/value heads, T queries, K keys of a part, D width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class _Merged(torch.autograd.Function):
    """Attention over several parts, merged forward by the log-sum-exp, backward by giving it to each part."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, *parts: Tensor) -> Tensor:
        """Attend from query [B, H, T, D] to parts: key and value [B, G, K, D] of each part, the causal one last.

        The causal part has a key for each head, [B, H, T, D].
        """
        last = len(parts) // 2 - 1
        outs, lses = [], []
        for i in range(last + 1):
            key, value = parts[2 * i : 2 * i + 2]
            groups = query.shape[1] // key.shape[1]
            out, lse = _forward(_grouped(query, groups), key, value, 0.0, i == last)
            outs.append(_heads_apart(out, groups))
            lses.append(_heads_apart(lse, groups))
        lse = torch.stack(lses).logsumexp(0)
        weighted = (o.to(lse.dtype) * (part - lse).exp()[..., None] for o, part in zip(outs, lses, strict=True))
        out = reduce(torch.add, weighted).to(query.dtype)
        ctx.save_for_backward(query, out, lse, *parts)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of query and parts, from that of the output, [B, H, T, D]."""
        query, out, lse, *parts = ctx.saved_tensors
        last = len(parts) // 2 - 1
        grads: list[Tensor] = []
        grad_query: Tensor | None = None
        for i in range(last + 1):
            key, value = parts[2 * i : 2 * i + 2]
            groups = query.shape[1] // key.shape[1]
            g_out, q, o, log = (_grouped(x, groups) for x in (grad_out, query, out, lse))
            g_query, g_key, g_value = _backward(g_out, q, key, value, o, log, 0.0, i == last)
            g_query = _heads_apart(g_query, groups)
            grad_query = g_query if grad_query is None else grad_query + g_query
            grads += (g_key, g_value)
        assert grad_query is not None
        return (grad_query, *grads)


def _grouped(x: Tensor, groups: int) -> Tensor:
    """Return x [B, H, T, ...] with the heads of each group as further queries: [B, G, groups T, ...]."""
    return x.unflatten(1, (-1, groups)).flatten(2, 3)


def _heads_apart(x: Tensor, groups: int) -> Tensor:
    """Return x [B, G, groups T, ...] as [B, H, T, ...]: the inverse of `_grouped`."""
    return x.unflatten(2, (groups, -1)).flatten(1, 2)


def merged_attention(query: Tensor, parts: Sequence[tuple[Tensor, ...]]) -> Tensor:
    """Attend on the CPU from every query to all parts, in one softmax.

    Args:
        query: [B, H, T, D].
        parts: (key, value), [B, G, K, D] each, H a multiple of G. The last part is causal: [B, H, T, D], a key for each
            query of each head. The others are seen whole.
    Returns: [B, H, T, D].
    """
    out: Tensor = _Merged.apply(query, *(tensor for part in parts for tensor in part))
    return out
