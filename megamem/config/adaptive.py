"""Adaptive input and softmax as a configuration: the vocabulary in clusters of words, frequent ones first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, PositiveInt

from megamem.config.base import ConfigModel
from megamem.config.mup import MupConfig


@dataclass(frozen=True)
class Cluster:
    """A run of the vocabulary whose words have embeddings of one width."""

    begin: int
    """The first token id."""
    end: int
    """The token id after the last one."""
    rows: int
    """Its words, filled up so that tensor-parallel ranks share them evenly."""
    width: int
    """Numbers of each word's vector."""


class AdaptiveConfig(ConfigModel):
    """Adaptive input (Baevski and Auli, 2019) and adaptive softmax (Grave et al., 2017), as Transformer-XL (Dai et al.,
    2019) uses them: token ids must be in descending order of frequency."""

    cutoffs: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    """The token ids at which clusters after the first begin, ascending: `[20000, 40000, 200000]` for WikiText-103."""
    divisor: PositiveInt = 1
    """Cluster i (from 0) has vectors of width hidden_size / divisor^i, rounded down, and a projection where that is
    less than hidden_size. With 1 all are as wide as the model."""
    input: bool = True
    """Whether the embedding is in clusters; if not, it is one table."""
    softmax: bool = True
    """Whether the output head is in clusters: the first one's words and one logit for each further cluster, then the
    words of the label's own cluster alone. If not, it is one matrix over the vocabulary."""
    tie_projections: bool = False
    """Use the embedding's projections as the output head's too; needs `model.tie_embeddings`, which ties the vectors
    alone."""
    row_multiple: PositiveInt = 8
    """The rows of each cluster, and the logits of further clusters, are filled up to a multiple of this number, which
    parallel.tp must divide. Rows beyond the vocabulary are never predicted."""

    def filled(self, rows: int) -> int:
        """Return so many rows filled up to a multiple of `row_multiple`."""
        return -(-rows // self.row_multiple) * self.row_multiple

    def clusters(self, vocab_size: int, hidden_size: int) -> tuple[Cluster, ...]:
        """Return the clusters of a vocabulary, in order."""
        begins, ends = (0, *self.cutoffs), (*self.cutoffs, vocab_size)
        return tuple(
            Cluster(begin, end, self.filled(end - begin), hidden_size // self.divisor**i)
            for i, (begin, end) in enumerate(zip(begins, ends, strict=True))
        )

    @property
    def cluster_rows(self) -> int:
        """The logits that stand for clusters after the first, filled up."""
        return self.filled(len(self.cutoffs))

    def check(self, vocab_size: int, hidden_size: int, tied: bool, mup: MupConfig | None) -> None:
        """Raise ValueError naming the field of a model that does not fit these clusters."""
        if mup is not None:
            raise ValueError("adaptive does not go with mup, which has no rule for clusters; leave one of them out")
        cutoffs = list(self.cutoffs)
        if cutoffs != sorted(set(cutoffs)):
            raise ValueError(f"adaptive.cutoffs {cutoffs} do not ascend; give each cluster's first token id in order")
        if cutoffs[-1] >= vocab_size:
            raise ValueError(
                f"adaptive.cutoffs {cutoffs}: {cutoffs[-1]} is not below vocab_size {vocab_size}, so the last cluster "
                "would be empty"
            )
        for i, cluster in enumerate(self.clusters(vocab_size, hidden_size)):
            if not cluster.width:
                raise ValueError(
                    f"adaptive.divisor {self.divisor} leaves cluster {i} no width: hidden_size {hidden_size} / "
                    f"{self.divisor}^{i} is below 1; use a smaller divisor or fewer cutoffs"
                )
        if not (self.input or self.softmax):
            raise ValueError("adaptive: input false and softmax false leave nothing in clusters; leave adaptive out")
        if tied and not (self.input and self.softmax):
            raise ValueError(
                f"tie_embeddings true does not go with adaptive.input {str(self.input).lower()} and adaptive.softmax "
                f"{str(self.softmax).lower()}; both ends need the same clusters"
            )
        if self.tie_projections and not (tied and self.divisor > 1):
            raise ValueError(
                "adaptive.tie_projections true needs tie_embeddings true and adaptive.divisor above 1 (it is "
                f"{self.divisor}); otherwise there are no projections to tie"
            )

    def shares(self, vocab_size: int) -> list[float]:
        """Return the share of tokens that lie in each cluster, if words follow Zipf's law: frequency as 1 / rank."""
        ranks = [_harmonic(rank) for rank in (0, *self.cutoffs, vocab_size)]
        return [(after - before) / ranks[-1] for before, after in zip(ranks, ranks[1:], strict=False)]

    def typical_tokens(self, vocab_size: int, count: int) -> list[int]:
        """Return token ids whose clusters are as frequent as `shares` says, as nearly as `count` of them can be."""
        bounds, total = [], 0.0
        for share in self.shares(vocab_size):
            total += share
            bounds.append(total)
        begins = (0, *self.cutoffs)
        # evenly spaced places of the cumulated shares; the last bound may have been rounded down
        clusters = (
            next((i for i, bound in enumerate(bounds) if (k + 0.5) / count < bound), len(self.cutoffs))
            for k in range(count)
        )
        return [begins[cluster] for cluster in clusters]


def check_vocabulary(vocab_size: int, padded_vocab_size: int | None, adaptive: AdaptiveConfig | None) -> None:
    """Raise ValueError where `padded_vocab_size` has no room for the vocabulary, or clusters are filled up instead."""
    if padded_vocab_size is None:
        return
    if padded_vocab_size < vocab_size:
        raise ValueError(f"padded_vocab_size {padded_vocab_size} is below vocab_size {vocab_size}")
    if adaptive is not None:
        raise ValueError(
            f"padded_vocab_size {padded_vocab_size} does not go with adaptive, which fills up each cluster to a "
            f"multiple of adaptive.row_multiple {adaptive.row_multiple}; leave it out"
        )


def narrow_width(clusters: Sequence[Cluster], hidden_size: int) -> int:
    """Return the sum of the widths of clusters that are narrower than the model, which need projections."""
    return sum(cluster.width for cluster in clusters if cluster.width < hidden_size)


def _harmonic(n: int) -> float:
    """Return 1 + 1/2 + ... + 1/n, by Euler's formula, to within 1 %."""
    return 0.0 if n == 0 else math.log(n) + 0.5772156649 + 1 / (2 * n) - 1 / (12 * n * n)
