"""The infinity-former's long-term memory: a continuous signal, written by regression and read by continuous attention.

Martins, Marinho and Martins, "infinity-former: Infinite Memory Transformer", 2022. At the first token of a chunk the L
vectors x that have become old are added to the signal (equations 14, 15, 18), then the chunk's queries read it:

    write   X = sigmoid(conv(x)) * x;   B' = fit of [samples of the old signal; X]          see `gaussian_basis`
    where   mu = sigmoid(w_mu . K q / sqrt(D)),  var = softplus(w_var . K q / sqrt(D)),  K = B W_k   (8 to 10)
    read    z = V^T E[psi(t)],  t ~ N(mu, var),  V = B W_v,  E[psi_j] = N(mu; center_j, var + width_j^2)   (11)

w_mu . K q is (W_k B^T w_mu) . q: two keys for each head, however many basis functions there are. The samples lie at
equal distances or, for sticky memories, where the queries of the chunk before looked (equation 16).

Letters of shapes: T tokens, L tokens of a chunk, N basis functions, M samples, D head_dim, B batch rows, H local heads,
W hidden_size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megamem.config.model import ModelConfig
from megamem.memory.base import State, TensorSpec, state_dtype, to_device
from megamem.memory.continuous.gaussian_basis import Regression, expected_basis, operators
from megamem.ops.attention.continuous import continuous_attention
from megamem.parallel.linears import Linears, constant, declare, normal

EDGE = 1e-6
"""By how much the first and the last bin reach beyond [0, 1], as in the authors' code."""


@dataclass(frozen=True)
class Places:
    """Where the samples of the old signal are taken."""

    sticky: str
    """`none`: at equal distances; `spread` or `random`: by the attention of the chunk before."""
    bins: int
    """Intervals of [0, 1] over which attention is counted."""
    at: float
    """Place of a sample in its bin: 0 its left edge, 0.5 its middle."""
    seed: int
    """Seed of the random draws."""


def long_term_specs(regression: Regression, places: Places) -> dict[str, TensorSpec]:
    """Declare coefficients, the chunk that is added to them next, and for sticky memories where to sample them.

    Every rank holds them whole, as a coefficient's keys and values are made of all channels.
    """
    specs = {
        "coefficients": TensorSpec((regression.basis.count, "batch", "hidden"), dtype="float32", long_term=True),
        "evicted": TensorSpec((regression.tokens, "batch", "hidden"), long_term=True),
    }
    if places.sticky != "none":
        specs["histogram"] = TensorSpec((places.bins, "batch"), dtype="float32", long_term=True)
        specs["samples"] = TensorSpec((regression.samples, "batch"), dtype="float32", long_term=True)
    return specs


class ConvolutionGate(nn.Module):
    """sigmoid(conv(x)) * x over three neighbours of one chunk (equation 18); beyond its ends stand zeros."""

    def __init__(self, model: ModelConfig, linears: Linears) -> None:
        super().__init__()
        self.linears = linears
        weight = nn.Parameter(torch.empty(model.hidden_size, 3 * model.hidden_size))
        self.weight = declare(weight, normal(model.init_std), fan_in=1)
        self.bias = declare(nn.Parameter(torch.empty(model.hidden_size)), constant(0.0))

    def forward(self, x: Tensor) -> Tensor:
        """[L, B, W] -> [L, B, W]."""
        padded = F.pad(x, (0, 0, 0, 0, 1, 1))
        neighbours = torch.cat((padded[:-2], x, padded[2:]), dim=-1)
        # every rank gates the same vectors; the gradient of the weights comes from each rank's heads
        gate = F.linear(neighbours, self.linears.shared(self.weight), self.linears.shared(self.bias))
        return gate.sigmoid() * x


class Focus(nn.Module):
    """The vectors w_mu and w_var, with a weight for each basis function: where, and how narrowly, queries look."""

    def __init__(self, count: int, linears: Linears) -> None:
        super().__init__()
        self.linears = linears
        # the spread of torch's own start values for a projection of so many inputs
        self.weight = declare(nn.Parameter(torch.empty(2, count)), normal((3 * count) ** -0.5), fan_in=1)

    def forward(self, coefficients: Tensor) -> Tensor:
        """Return B^T w_mu and B^T w_var [2, B, W] of coefficients [N, B, W]."""
        weight = self.linears.shared(self.weight).to(coefficients.dtype)
        return (weight @ coefficients.flatten(1)).unflatten(1, coefficients.shape[1:])


@dataclass(frozen=True)
class Reading:
    """What the queries of some tokens get from the memory."""

    values: Tensor
    """z, [T, B, H, D]; zeros in rows without a memory."""
    divergence: Tensor
    """The regularizer (equation 21), summed over tokens, a mean over all heads: [B], zeros likewise."""
    histogram: Tensor | None
    """Attention of all queries and heads to each bin, [bins, B], for sticky memories."""


class Observer(Protocol):
    """The interface of what looks on while a memory is updated and read, to report what it attends to."""

    def updated(self, written: Sequence[int], begins: Sequence[bool], samples: Tensor | None) -> None:
        """Take what `LongTermMemory.update` was called with; samples: [M, B] places, None at equal distances."""

    def attended(self, mean: Tensor, variance: Tensor, written: Sequence[int]) -> None:
        """Take the densities of this rank's heads and the queries of a slice; mean, variance: [B, H, T]."""


class LongTermMemory(nn.Module):
    """The parameters of one layer's long-term memory, and what is done with them. Its state belongs to the mixer."""

    observer: Observer | None = None
    """Set by `observed_by` alone."""

    def __init__(
        self,
        model: ModelConfig,
        linears: Linears,
        regression: Regression,
        places: Places,
        *,
        layer: int,
        restart_after: int | None,
        min_variance: float,
        prior: tuple[float, float | None],
    ) -> None:
        """Build the projections.

        Args:
            model: the model as its layers see it.
            linears: makes the projections.
            regression: basis and matrices.
            places: where the old signal is sampled.
            layer: number of the layer, for its random draws.
            restart_after: chunks after which the memory begins again; None: never.
            min_variance: smallest variance of attention.
            prior: sigma_0 and mu_0 of the regularizer; mu_0 None leaves the mean free.
        """
        super().__init__()
        self.linears, self.regression, self.places, self.layer = linears, regression, places, layer
        self.restart_after, self.min_variance, self.prior = restart_after, min_variance, prior
        self.width, self.heads = model.resolved_head_dim, model.heads
        inner, init = model.heads * self.width, normal(model.init_std)
        self.gate = ConvolutionGate(model, linears)
        self.focus = Focus(regression.basis.count, linears)
        self.key = linears.column(model.hidden_size, inner, init)
        self.value = linears.column(model.hidden_size, inner, init)

    def update(self, state: State, written: Sequence[int], begins: Sequence[bool]) -> Tensor:
        """Return the coefficients [N, B, W] that the tokens of a slice read.

        Args:
            state: before the slice.
            written: how many chunks have become old in each row's document, the one in `evicted` included.
            begins: whether the slice is the first of each row's chunk, with which `evicted` is added.
        """
        if self.observer is not None:
            self.observer.updated(written, begins, state.get("samples"))
        old: Tensor = state["coefficients"]
        matrices = operators(self.regression, old.dtype, old.device)
        # gated in every chunk, added or not: ZeRO 3 gathers the parameters from all ranks whenever one uses them, and
        # needs a gradient of each, if of zeros, from every backward pass
        gated = self.gate(state["evicted"]).to(old.dtype).flatten(1)
        numbers = [(count - 1) % self.restart_after if self.restart_after else count - 1 for count in written]
        adds = [begin and count > 0 for begin, count in zip(begins, written, strict=True)]
        first = [add and number == 0 for add, number in zip(adds, numbers, strict=True)]
        later = [add and number > 0 for add, number in zip(adds, numbers, strict=True)]
        new = old
        if not any(adds) and torch.is_grad_enabled():
            left = gated[:1, :1].sum()
            new = old + torch.where(torch.zeros_like(left, dtype=torch.bool), left, torch.zeros_like(left))
        if any(first):
            new = _chosen(first, (matrices.first @ gated).view_as(old), new)
        if any(later):
            if self.places.sticky == "none":
                kept = (matrices.contract @ old.flatten(1)).view_as(old)
            else:
                places = state["samples"]  # [M, B]
                bumps = expected_basis(places, torch.zeros_like(places), matrices.centers, matrices.variances)
                sampled = torch.einsum("mbn,nbw->mbw", bumps, old)
                kept = (matrices.old @ sampled.flatten(1)).view_as(old)
            new = _chosen(later, kept + (matrices.new @ gated).view_as(old), new)
        return new

    def read(self, query: Tensor, coefficients: Tensor, written: Sequence[int]) -> Reading:
        """Read the signal by continuous attention.

        Args:
            query: before rotation, scaled, [T, B, H, D].
            coefficients: B [N, B, W], see `update`.
            written: see `update`.
        """
        exact = state_dtype(query.dtype)
        matrices = operators(self.regression, exact, query.device)
        signal = coefficients.to(query.dtype)
        keys = self._heads(self.key, self.focus(signal))  # [2, B, H, D]
        values = self._heads(self.value, signal)  # [N, B, H, D]
        looks = torch.einsum("tbhd,cbhd->cbht", query, keys).to(exact) * self.width**-0.5
        mean, variance = looks[0].sigmoid(), F.softplus(looks[1]).clamp(min=self.min_variance)
        if self.observer is not None:
            self.observer.attended(mean, variance, written)
        widths = len(self.regression.basis.widths)  # one bump of each at every center
        read = continuous_attention(
            mean, variance, values.permute(1, 2, 0, 3), matrices.centers[::widths], matrices.variances[:widths]
        )  # [B, H, T, D]
        has_memory = [count > 0 for count in written]
        histogram = None
        if self.places.sticky != "none":
            with torch.no_grad():
                counted = self.linears.sum_over_ranks(self._histogram(mean, variance))
                histogram = counted.where(to_device(has_memory, query.device, torch.bool), 0.0)
        return Reading(
            _chosen(has_memory, read.permute(2, 0, 1, 3), torch.zeros((), dtype=read.dtype, device=read.device)),
            self._divergence(mean, variance) * to_device(has_memory, query.device, torch.bool),
            histogram,
        )

    @contextmanager
    def observed_by(self, observer: Observer) -> Iterator[None]:
        """Show each update and each reading to `observer`, inside a `with` statement."""
        self.observer = observer
        try:
            yield
        finally:
            self.observer = None

    def _heads(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Project x [rows, B, W] to [rows, B, H, D]."""
        out: Tensor = layer(x)
        return out.unflatten(-1, (-1, self.width))

    def _divergence(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Return KL(N(mu, var) || N(mu_0 or mu, sigma_0^2)) of [B, H, T], summed over T, a mean over all heads: [B]."""
        width, center = self.prior
        ratio = variance / width**2
        divergence = 0.5 * (ratio - ratio.log() - 1)
        if center is not None:
            divergence = divergence + 0.5 * (mean - center) ** 2 / width**2
        return self.linears.sum_over_ranks(divergence.sum((1, 2))) / self.heads

    def _histogram(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Return the attention to each bin, of N(mu, var) [B, H, T] summed over heads and tokens: [bins, B]."""
        edges = torch.linspace(0, 1, self.places.bins + 1, dtype=mean.dtype, device=mean.device)
        edges[0], edges[-1] = -EDGE, 1 + EDGE
        below = torch.special.ndtr((edges - mean[..., None]) / variance.sqrt()[..., None])
        return below.sum((1, 2)).diff(dim=-1).T

    def samples(self, histogram: Tensor, written: Sequence[int]) -> Tensor:
        """Return places at which to sample the signal, by the attention [bins, B] to it: [M, B], ascending.

        written: see `update`; random draws are a function of it, the layer and the seed, the same on every layout.
        """
        count = self.regression.samples
        if self.places.sticky == "random":
            draws = np.stack(
                [np.sort(np.random.default_rng((self.places.seed, self.layer, n)).random(count)) for n in written]
            )
        else:
            draws = np.broadcast_to((np.arange(count) + 0.5) / count, (len(written), count))
        shares = histogram.T.cumsum(1)  # [B, bins]
        wanted = to_device(torch.from_numpy(draws.copy()), histogram.device, histogram.dtype) * shares[:, -1:]
        chosen = torch.searchsorted(shares, wanted).clamp(max=self.places.bins - 1)
        return (chosen.to(histogram.dtype) + self.places.at).T / self.places.bins


def _chosen(rows: Sequence[bool], there: Tensor, elsewhere: Tensor) -> Tensor:
    """Return `there` [..., B, ...] (rows in its second axis) in the chosen rows, `elsewhere` in the others."""
    if all(rows):
        return there
    chosen = to_device(list(rows), there.device, torch.bool)
    return torch.where(chosen.view(1, -1, *[1] * (there.ndim - 2)), there, elsewhere)
