"""Adaptive input and adaptive softmax: embedding and output head of a vocabulary in clusters, frequent words first.

Grave et al., "Efficient softmax approximation for GPUs" (2017); Baevski and Auli, "Adaptive Input Representations for
Neural Language Modeling" (2019); Dai et al., "Transformer-XL" (2019). Cluster 0 is the shortlist. Of a token whose
hidden vector is x, with C_i the vectors of cluster i, P_i its projection and b_i the vector that stands for it:

    p(word) = softmax([C_0 x; b_1 x; ...; b_K x])[word]                              for a word of the shortlist
    p(word) = softmax([C_0 x; b_1 x; ...; b_K x])[b_i] softmax(C_i P_i^T x)[word]    for a word of cluster i

The rows of every cluster are split over tensor-parallel ranks. In the head's logits a rank's part of the shortlist
stands in front of its part of the clusters, which makes one vocabulary of them as far as losses are concerned.

Letters: T tokens, B batch, N tokens of all batch rows, n those of a cluster, D hidden_size, K clusters besides the
shortlist, w width of a cluster, W sum of the widths that are less than D, V vocabulary, R tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megamem.config.adaptive import narrow_width
from megamem.config.model import ModelConfig
from megamem.parallel.linears import Linears, SplitRows, declare, normal


class Projections(nn.Module):
    """The projections between the width of the model and those of all narrower clusters, side by side: [D, W]."""

    def __init__(self, model: ModelConfig, linears: Linears) -> None:
        super().__init__()
        self.linears = linears
        self.widths = [cluster.width for cluster in model.clusters if cluster.width < model.hidden_size]
        table = torch.empty(model.hidden_size, sum(self.widths))
        self.weight = declare(nn.Parameter(table), normal(model.init_std), fan_in=1)


class EmbeddingProjections(Projections):
    """The projections from all narrower clusters to the width of the model."""

    def forward(self, rows: Tensor) -> Tensor:
        """Project embeddings [tokens, batch, W], this rank's tokens of each cluster: [tokens, batch, D]."""
        return F.linear(rows, self.linears.outside(self.weight))


class HeadProjections(Projections):
    """The projections from the width of the model to those of all narrower clusters."""

    def forward(self, hidden: Sequence[Tensor]) -> list[Tensor]:
        """Project hidden vectors [n, D] of the tokens of each narrower cluster: [n, w] each."""
        return projected(hidden, self.weight, self.widths, self.linears)


def projected(hidden: Sequence[Tensor], weight: Tensor, widths: Sequence[int], linears: Linears) -> list[Tensor]:
    """Return the products [n, w] of the hidden vectors [n, D] of each cluster with its columns of weight [D, W]."""
    # each rank goes on with its own words: the gradients of the projections are summed over ranks, all at once
    columns = linears.shared(weight).split(list(widths), dim=1)
    return [x.to(own.device) @ own for x, own in zip(hidden, columns, strict=True)]


class AdaptiveEmbedding(nn.Module):
    """Adaptive input: each cluster has a table of its own, as wide as its words are worth."""

    def __init__(self, model: ModelConfig, linears: Linears, projects: bool) -> None:
        """Make the tables; `projects` says whether to make projections, which a head tied to the tables may do without.

        Where no cluster is narrower than the model there are none in any case.
        """
        super().__init__()
        self.linears, self.hidden_size = linears, model.hidden_size
        self.ranges = model.clusters
        start = normal(model.init_std)
        self.clusters = nn.ModuleList(linears.rows(c.rows, c.width, start) for c in model.clusters)
        self.projections: EmbeddingProjections | None = None
        if projects and narrow_width(model.clusters, model.hidden_size):
            self.projections = EmbeddingProjections(model, linears)

    @property
    def tables(self) -> list[SplitRows]:
        """The table of each cluster, in order."""
        return cast(list[SplitRows], list(self.clusters))

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed ids [T, B] int64: this rank's [tokens, B, D].

        Raises: IndexError on the CPU for an id that no cluster has; a device would wait, and has zeros there.
        """
        if tokens.device.type == "cpu" and tokens.numel():
            (lowest, highest), end = map(int, tokens.aminmax()), self.ranges[-1].end
            if lowest < 0 or highest >= end:
                raise IndexError(f"token ids from {lowest} to {highest} in a vocabulary of {end}")
        wide, narrow = None, []
        for table, own in zip(self.tables, self.ranges, strict=True):
            # words of other clusters are nobody's rows: zeros, as those of other ranks
            rows = table((tokens - own.begin).masked_fill(tokens >= own.end, -1))
            if rows.shape[-1] < self.hidden_size:
                narrow.append(rows)
            else:
                wide = rows if wide is None else wide + rows
        assert wide is not None  # the shortlist is as wide as the model
        # one sum over ranks for all clusters, in front of the projections, which every rank then does alike
        summed = self.linears.split_tokens(self.linears.sum_over_ranks(torch.cat((wide, *narrow), dim=-1)))
        if self.projections is None:
            return summed
        wide, rest = summed[..., : self.hidden_size], summed[..., self.hidden_size :]
        return wide + cast(Tensor, self.projections(rest))


class AdaptiveSoftmax(nn.Module):
    """Adaptive softmax: the head over shortlist and clusters, and the words of each cluster.

    Where embeddings are tied, the vectors of the words are those of the embedding, which every call is given.
    """

    def __init__(self, model: ModelConfig, linears: Linears) -> None:
        super().__init__()
        assert model.adaptive is not None
        self.linears, self.config, self.ranges = linears, model, model.clusters
        self.cluster_rows = model.adaptive.cluster_rows
        start = normal(model.init_std)
        if not model.tie_embeddings:
            self.clusters = nn.ModuleList(linears.column(c.width, c.rows, start) for c in model.clusters)
        self.cluster_vectors = linears.column(model.hidden_size, self.cluster_rows, start)
        self.projections: HeadProjections | None = None
        if narrow_width(model.clusters, model.hidden_size) and not model.adaptive.tie_projections:
            self.projections = HeadProjections(model, linears)

    def token_losses(self, hidden: Tensor, labels: Tensor, tied: AdaptiveEmbedding | None) -> Tensor:
        """Return the losses [T, B] in float32 nats; words of a cluster are scored for the tokens alone that need them.

        Args:
            hidden: this rank's [tokens, B, D].
            labels: [T, B] int64, none ignored.
            tied: the embedding whose tables the head uses; None if it has its own.
        """
        x = self.linears.enter(hidden).flatten(0, 1)
        words = labels.flatten()
        cluster = self._cluster_of(words)
        members = [cluster == i for i in range(1, len(self.ranges))]
        # tokens by cluster; the host waits for the device once, to learn how many each has
        counts = torch.stack([member.sum() for member in members]).tolist()
        order = cluster.argsort(stable=True)[len(words) - sum(counts) :]
        tails = self._tail_logits(x[order].split(counts), tied)
        losses = self._losses(self._head_logits(x, tied), tails, words, cluster, order.split(counts))
        return losses.view_as(labels)

    @torch.no_grad()
    def token_scores(self, hidden: Tensor, labels: Tensor, tied: AdaptiveEmbedding | None) -> tuple[Tensor, Tensor]:
        """Return `token_losses`, and where the label is the most probable word [T, B] bool; for evaluation.

        A cluster's words are scored for tokens whose label is one of them, and where they could be the most probable:
        where the whole cluster is more probable than every word of the shortlist. Arguments: see `token_losses`.
        """
        x = self.linears.enter(hidden).flatten(0, 1)
        words = labels.flatten()
        cluster = self._cluster_of(words)
        head = self._head_logits(x, tied)
        normalizer = self.linears.log_normalizer(head)
        best, word = self.linears.largest(head[:, : self._local(self.ranges[0].rows)])
        best = best.to(normalizer.dtype) - normalizer
        logs = self._cluster_logits(head) - normalizer[:, None]
        # the host waits for the device once for each cluster
        wanted = [((cluster == i + 1) | (logs[:, i] > best)).nonzero()[:, 0] for i in range(logs.shape[-1])]
        tails, members = [], []
        found = self._tail_logits([x[index] for index in wanted], tied)
        for i, (index, tail) in enumerate(zip(wanted, found, strict=True)):
            labelled = cluster[index] == i + 1
            if len(index):  # the same on all ranks: none waits for another
                value, place = self.linears.largest(tail)
                value = logs[index, i] + value.to(logs.dtype) - self.linears.log_normalizer(tail)
                # of equals the first in the vocabulary
                better = value > best[index]
                best[index] = torch.where(better, value, best[index])
                word[index] = torch.where(better, place + self.ranges[i + 1].begin, word[index])
            tails.append(tail[labelled])
            members.append(index[labelled])
        losses = self._losses(head, tails, words, cluster, members)
        return losses.view_as(labels), (word == words).view_as(labels)

    def logits(self, hidden: Tensor, tied: AdaptiveEmbedding | None) -> Tensor:
        """Return the logarithms of all words' probabilities: this rank's [T, B, padded V / R], -inf beyond V.

        Every word is scored for every token: for generation, and wherever a distribution is wanted. In the vocabulary
        a rank's rows lie apart, so that here they are gathered, and cut again. Arguments: see `token_losses`.
        """
        x = self.linears.enter(hidden)
        head = self._head_logits(x, tied)
        # each rank goes on with its own words: gradients of what they share are summed over ranks
        normalizer = self.linears.shared(self.linears.log_normalizer(head))[..., None]
        parts = [head[..., : self._local(self.ranges[0].rows)] - normalizer]
        logs = self.linears.shared(self._cluster_logits(head)) - normalizer
        for i, tail in enumerate(self._tail_logits([x] * (len(self.ranges) - 1), tied)):
            within = self.linears.shared(self.linears.log_normalizer(tail))[..., None]
            parts.append(logs[..., i : i + 1] + tail - within)
        whole = [self._whole(part)[..., : c.end - c.begin] for part, c in zip(parts, self.ranges, strict=True)]
        spare = self.config.resolved_padded_vocab_size - self.config.vocab_size
        padded = F.pad(torch.cat(whole, dim=-1), (0, spare), value=-torch.inf)
        return self.linears.shared(padded).chunk(self.linears.tp_size, dim=-1)[self.linears.tp_rank]

    def _losses(
        self, head: Tensor, tails: Sequence[Tensor], words: Tensor, cluster: Tensor, members: Sequence[Tensor]
    ) -> Tensor:
        """Return the losses [N] of words [N] of the clusters [N], which are [N] ids from 0.

        Args:
            head: [N, (shortlist + clusters) / R] logits.
            tails: [n, rows / R] logits of each cluster, of the tokens alone whose label is in it.
            words, cluster: [N] int64, the labels and their clusters.
            members: [n] int64, the places of these tokens among all.
        """
        # places in the head as its ranks lie side by side: parts of the shortlist, each with a part of the clusters
        first, second = self._local(self.ranges[0].rows), self._local(self.cluster_rows)
        short, chosen = words.clamp(max=self.ranges[0].end - 1), (cluster - 1).clamp(min=0)
        place = torch.where(
            cluster == 0,
            short // first * (first + second) + short % first,
            chosen // second * (first + second) + first + chosen % second,
        )
        labels = [words[index] - own.begin for index, own in zip(members, self.ranges[1:], strict=True)]
        of_head, *of_tails = self.linears.cross_entropies([head, *tails], [place, *labels])
        return of_head.index_add(0, torch.cat(list(members)), torch.cat(of_tails))

    def _cluster_of(self, words: Tensor) -> Tensor:
        """Return the cluster [N] of words [N], both int64."""
        found = torch.zeros_like(words)
        for own in self.ranges[1:]:
            found = found + (words >= own.begin)
        return found

    def _head_logits(self, x: Tensor, tied: AdaptiveEmbedding | None) -> Tensor:
        """Return the logits [..., (shortlist + clusters) / R] of shortlist and clusters. x: [..., D]."""
        short = self._word_logits(x, 0, tied)
        clusters = self._masked(self.cluster_vectors(x), len(self.ranges) - 1)
        return torch.cat((short, clusters.to(short.device)), dim=-1)

    def _tail_logits(self, hidden: Sequence[Tensor], tied: AdaptiveEmbedding | None) -> list[Tensor]:
        """Return the logits [..., rows / R] of the words of each cluster but the first, of its tokens [..., D].

        Every table and projection is used, if for no token: ZeRO 3 wants the same modules run on all ranks, and each
        parameter a gradient from every backward pass.
        """
        wide = [x for x, own in zip(hidden, self.ranges[1:], strict=True) if own.width == self.config.hidden_size]
        narrow = list(hidden[len(wide) :])  # widths never grow
        if narrow and self.projections is not None:
            narrow = self.projections(narrow)
        elif narrow:
            assert tied is not None
            assert tied.projections is not None
            narrow = projected(narrow, tied.projections.weight, tied.projections.widths, self.linears)
        return [self._word_logits(x, i + 1, tied) for i, x in enumerate((*wide, *narrow))]

    def _word_logits(self, x: Tensor, index: int, tied: AdaptiveEmbedding | None) -> Tensor:
        """Return the logits [..., rows / R] of a cluster's words, -inf for rows without a word. x: [..., w]."""
        if tied is None:
            logits = self.clusters[index](x)
        else:  # whose tables lie on another device where layers are spread over several
            weight = tied.tables[index].weight
            logits = F.linear(x.to(weight.device), weight)
        own = self.ranges[index]
        return self._masked(logits, own.end - own.begin)

    def _masked(self, logits: Tensor, count: int) -> Tensor:
        """Return logits [..., rows / R] with -inf from row `count` of all ranks on."""
        own = count - self.linears.tp_rank * logits.shape[-1]
        if own >= logits.shape[-1]:
            return logits
        return logits.masked_fill(torch.arange(logits.shape[-1], device=logits.device) >= own, -torch.inf)

    def _cluster_logits(self, head: Tensor) -> Tensor:
        """Return the logits [..., K] of the clusters on every rank, in float32.

        head: [..., (shortlist + clusters) / R].
        """
        own = head[..., self._local(self.ranges[0].rows) :]
        whole = self._whole(own if own.dtype == torch.float64 else own.float())
        return whole[..., : len(self.ranges) - 1]

    def _whole(self, part: Tensor) -> Tensor:
        """Return all ranks' parts [..., rows / R] side by side, [..., rows]."""
        size, rank = part.shape[-1], self.linears.tp_rank
        before, behind = rank * size, (self.linears.tp_size - 1 - rank) * size
        return self.linears.sum_over_ranks(F.pad(part, (before, behind)))

    def _local(self, rows: int) -> int:
        """Return this rank's share of so many rows."""
        return rows // self.linears.tp_size
