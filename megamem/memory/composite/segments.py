"""Segments whose memories are kept: how well each fits a token, and the share of its answer in the token's."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor


class Gating(NamedTuple):
    """How the answers of kept segments are weighed; fields as in `MemoryCachingConfig`."""

    combine: Literal["residual", "grm", "soup", "ssc"]
    gate: Literal["softmax", "sigmoid", "raw"]
    top_k: int


class Segments(NamedTuple):
    """Some kept segments."""

    weights: tuple[Tensor, ...]
    """Of their memories, [batch, heads, segments, ...] each."""
    pools: Tensor
    """[batch, heads, segments, width]"""
    visible: Tensor
    """Which each row may read, [batch, segments] bool."""


def gate_shares(asking: Tensor, pools: Tensor, kept: list[Segments], gating: Gating) -> tuple[Tensor, list[Tensor]]:
    """What part of each token's answer comes from the open segment, and from each kept one.

    Args:
        asking: u [batch, heads, groups, tokens, width].
        pools: of the open segment up to each token, [batch, heads, tokens, width].
        kept: lists of kept segments.
        gating: how they are weighed.
    Returns: shares of the open segment [batch, heads, groups, tokens, 1]; of each list [..., tokens, segments].
    """
    sizes = [part.pools.shape[2] for part in kept]
    # [batch, 1, 1, 1, segments]
    visible = [part.visible[:, None, None, None] for part in kept]
    if gating.combine == "residual":
        shape = asking.shape[:-1]
        return asking.new_ones((*shape, 1)), [v.to(asking.dtype).expand(*shape, -1) for v in visible]
    own = (asking * pools[:, :, None]).sum(-1, keepdim=True)
    if not kept:
        return _gates(own, gating.gate), []
    scores = torch.cat([asking @ part.pools.mT[:, :, None] for part in kept], dim=-1)
    allowed = torch.cat(visible, dim=-1).expand(scores.shape)
    if gating.combine == "ssc":
        allowed = allowed & _best(scores.masked_fill(~allowed, -torch.inf), gating.top_k)
    if gating.gate == "softmax":
        shares = torch.cat((own, scores.masked_fill(~allowed, -torch.inf)), dim=-1).softmax(-1)
        return shares[..., :1], list(shares[..., 1:].split(sizes, dim=-1))
    shares = _gates(scores, gating.gate).masked_fill(~allowed, 0.0)
    return _gates(own, gating.gate), list(shares.split(sizes, dim=-1))


def _gates(scores: Tensor, gate: str) -> Tensor:
    if gate == "softmax":  # of one segment alone
        return torch.ones_like(scores) + 0.0 * scores
    return scores.sigmoid() if gate == "sigmoid" else scores


def _best(scores: Tensor, count: int) -> Tensor:
    """The `count` highest of the last axis, as a mask; ties go to the first."""
    chosen = scores.topk(min(count, scores.shape[-1]), dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, chosen, True)
