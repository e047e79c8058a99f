"""Scores and shares of kept segments: how well each fits a token, and how much of the token's answer it gets.

Letters of shapes: B batch rows, H local key/value heads, G query heads that share one of them, T tokens, N kept
segments, D head_dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megamem.memory.base import State, to_device
from megamem.memory.shared.blocks import BlockSlice
from megamem.ops.deep_memory.kept_networks import Spans


@dataclass(frozen=True)
class SegmentSlice(BlockSlice):
    """Tokens of a call that in each batch row lie within one segment, the block of Memory Caching."""

    columns: int
    """How many columns of kept segments may be added while a row reads a segment: rows that end theirs at different
    places each fill columns of their own."""


class Gating(NamedTuple):
    """How the answers of kept segments are weighed; fields as in `MemoryCachingConfig`."""

    combine: Literal["residual", "grm", "soup", "ssc"]
    gate: Literal["softmax", "sigmoid", "raw", "none"]
    top_k: int
    scores: Literal["context", "token"]


class Segments(NamedTuple):
    """Some kept segments."""

    weights: tuple[Tensor, ...]
    """The matrices of their memories, [B, H, N, ...] each."""
    pools: Tensor
    """The pooled keys of each segment, [B, H, N, D]."""
    visible: Tensor
    """Which of them each row may read in each of S segments that ask together, [B, S, N] bool."""
    age: Tensor
    """How many segments before the one that asks each row ended them, from 1, [B, S, N] int64; any number where not
    visible."""
    far: bool = False
    """Whether their memories may lie in host memory."""
    spans: Spans = ()
    """Which of the tokens that ask together may read each of them; if not given, all may read all."""

    def of_tokens(self, x: Tensor, tokens: int) -> Tensor:
        """Return x [B, S, N] for each of the tokens that ask, [B, 1, 1, T, N], or [B, 1, 1, 1, N] where S is 1."""
        repeated = x if x.shape[1] == 1 else x.repeat_interleave(tokens // x.shape[1], dim=1)
        return repeated[:, None, None]


class Ended(NamedTuple):
    """What a segment that has just ended leaves behind in each row; or several in turn, with an axis N after H."""

    matrices: tuple[Tensor, ...]
    """The matrices of its memory, [B, H, ...] each."""
    key_sum: Tensor
    """The sum of its keys, [B, H, D]."""
    log_kept: Tensor | None
    """The logarithm of the product of its tokens' decays, [B, H]; None where nobody needs it."""

    def one(self, index: int) -> Ended:
        """Return one of several segments."""
        log_kept = None if self.log_kept is None else self.log_kept[:, :, index]
        return Ended(tuple(x[:, :, index] for x in self.matrices), self.key_sum[:, :, index], log_kept)


class KeptSegments(ABC):
    """Keeps what the segments of a text leave behind, in a layer's state, and says which of them a token may read."""

    @abstractmethod
    def room(self, state: State, segments: int) -> int:
        """Return how many of so many segments can be kept at once."""

    @abstractmethod
    def readable(self, state: State, block_slice: SegmentSlice) -> list[Segments]:
        """Return the kept segments that some row may read, the newest last, with a mask of those each row may."""

    @abstractmethod
    def one_by_one(
        self, state: State, ended: Ended, slices: Sequence[SegmentSlice], parameters: Mapping[str, Tensor]
    ) -> tuple[list[list[Segments]], State]:
        """Keep segments that are one in all rows; return what may be read in each of them, and the state after all.

        What may be read comes in as many lists as stretches of as many segments that ask together.

        Args:
            ended: N segments, [B, H, N, ...].
            slices: where the tokens of each lie.
            parameters: see `Inputs`.
        """

    @abstractmethod
    def close(self, state: State, ended: Ended, block_slice: SegmentSlice, parameters: Mapping[str, Tensor]) -> State:
        """Keep the segment [B, H, ...] of rows whose segment ends with the slice. parameters: see `Inputs`."""


def pool(key_sums: Tensor, counts: list[list[int]], pooling: Literal["mean", "sum"]) -> Tensor:
    """Return the means of keys from their sums [B, H, T, D] and their counts by row and token; or the sums."""
    if pooling == "sum":
        return key_sums
    return key_sums / to_device(counts, key_sums.device, key_sums.dtype)[:, None, :, None]


def gate_shares(
    router_query: Tensor, pools: Tensor, kept: list[Segments], gating: Gating
) -> tuple[Tensor, list[Tensor]]:
    """Return the shares (gamma in the paper) of the open segment and of each kept one in each token's answer.

    Source: Behrouz et al., "Memory Caching: RNNs with Growing Memory", equations 9, 14 and 15.

    Args:
        router_query: u [B, H, G, T, D]; with `scores: token` the scores by age, [B, H, G, T, ages].
        pools: the pooled keys of the open segment up to each token, [B, H, T, D].
        kept: lists of kept segments.
        gating: how they are weighed.
    Returns: shares of the open segment [B, H, G, T, 1]; for each list those of its segments, [B, H, G, T, N].
    """
    sizes, tokens = [part.pools.shape[2] for part in kept], router_query.shape[-2]
    visible = [part.of_tokens(part.visible, tokens) for part in kept]
    if gating.combine == "residual":
        # equation 7: every share is 1
        shape = router_query.shape[:-1]
        return router_query.new_ones((*shape, 1)), [v.to(router_query.dtype).expand(*shape, -1) for v in visible]
    # scores r of the open segment, and of all kept ones side by side
    by_age = gating.scores == "token"
    own = router_query[..., :1] if by_age else (router_query * pools[:, :, None]).sum(-1, keepdim=True)
    if not kept:
        return _gates(own, gating.gate), []
    scores = torch.cat([_scores(router_query, part, by_age) for part in kept], dim=-1)
    allowed = torch.cat(visible, dim=-1).expand(scores.shape)
    if gating.combine == "ssc":
        allowed = allowed & _highest(scores.masked_fill(~allowed, -torch.inf), gating.top_k)
    if gating.gate == "softmax":
        shares = torch.cat((own, scores.masked_fill(~allowed, -torch.inf)), dim=-1).softmax(-1)
        return shares[..., :1], list(shares[..., 1:].split(sizes, dim=-1))
    shares = _gates(scores, gating.gate).masked_fill(~allowed, 0.0)
    return _gates(own, gating.gate), list(shares.split(sizes, dim=-1))


def _scores(router_query: Tensor, part: Segments, by_age: bool) -> Tensor:
    """Return the scores r of kept segments, [B, H, G, T, N]: those of their ages, or <u_t, pool>.

    router_query: as in `gate_shares`.
    """
    if not by_age:
        return router_query @ part.pools.mT[:, :, None]
    # the oldest segments share the last score
    age = part.of_tokens(part.age.clamp(0, router_query.shape[-1] - 1), router_query.shape[-2])
    return router_query.gather(-1, age.expand(*router_query.shape[:-1], -1))


def _gates(scores: Tensor, gate: str) -> Tensor:
    """Return the shares that scores [B, H, G, T, N] come to, each by itself."""
    if gate == "softmax":
        # the softmax over one segment alone; the scores stay in the graph, with gradients of zero
        return torch.ones_like(scores) + 0.0 * scores
    if gate == "none":
        return torch.ones_like(scores)
    return scores.sigmoid() if gate == "sigmoid" else scores


def _highest(scores: Tensor, count: int) -> Tensor:
    """Return where the `count` highest scores [B, H, G, T, N] of each token are, bool; ties go to the first."""
    chosen = scores.topk(min(count, scores.shape[-1]), dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, chosen, True)
