"""infinity-former, one query and one basis function at a time.

Basis   psi_j(t) = exp(-(t - m_j)^2 / 2 w_j^2) / (w_j sqrt(2 pi)); centers m at equal distances from 0 to 1, at each of
        them one function of every width.
Fit     of rows x_i at places t_i: B solves (sum_i psi(t_i) psi(t_i)^T + lambda I) B = sum_i psi(t_i) x_i^T.
Write   before the first token of a chunk, what has become old (the chunk before, or the one that left the short memory)
        is gated, x_i * sigmoid(b + W [x_(i-1), x_i, x_(i+1)]) with zeros at its ends, and added. The first time, and
        each time `restart_after` tokens are full, it is fitted alone: to places (i - 1/2) / L among zeros at the
        further places of that grid in [-1/2, 3/2], or to i / L alone.
        Later it is fitted to tau + (1 - tau) i / L together with
        M samples of the old signal at tau m / M, and with zeros around.
Sample  the signal at m / M; or, sticky, where the m-th of M equal shares of the attention of the chunk before lies.
Read    with s_j = q . k_j / sqrt(width): mu = 1 / (1 + exp(-sum_j w_mu[j] s_j)),
        var = log(1 + exp(sum_j w_var[j] s_j)), z = sum_j v_j N(mu; m_j, var + w_j^2).
        Output W_o z_local + W_long (g z).
Loss    1/2 (var / s_0^2 - log(var / s_0^2) - 1) (+ (mu - m_0)^2 / 2 s_0^2) of each query that has a memory, mean over
        heads, summed over tokens.
"""

from __future__ import annotations

import importlib
import math

import numpy as np
import torch
from torch import Tensor

from tests.contract.oracles.common import Answer, heads, projected


class Signal:
    """The basis, and fits with it."""

    def __init__(self, mixer) -> None:
        places = mixer.basis // len(mixer.widths)
        self.bumps = [(c / (places - 1), w) for c in range(places) for w in mixer.widths]
        self.ridge = mixer.ridge

    def psi(self, t: float) -> Tensor:
        """Return all basis functions at one place, [N]."""
        values = [math.exp(-((t - m) ** 2) / (2 * w * w)) / (w * math.sqrt(2 * math.pi)) for m, w in self.bumps]
        return torch.tensor(values, dtype=torch.float64)

    def fit(self, places: list[float], rows: list[Tensor], zeros: list[float]) -> Tensor:
        """Return coefficients [N, width] of rows [width] at places, and of zeros at further ones."""
        normal = self.ridge * torch.eye(len(self.bumps), dtype=torch.float64)
        for t in [*places, *zeros]:
            normal = normal + torch.outer(self.psi(t), self.psi(t))
        wanted = sum(torch.outer(self.psi(t), x) for t, x in zip(places, rows, strict=True))
        return torch.linalg.solve(normal, wanted)


def gated(weights: dict[str, Tensor], rows: list[Tensor]) -> list[Tensor]:
    """Return the rows of a chunk, each times what the convolution of it and its neighbours lets through."""
    zero = torch.zeros_like(rows[0])
    padded = [zero, *rows, zero]
    return [
        rows[i]
        * torch.sigmoid(
            weights["long_term.gate.bias"] + weights["long_term.gate.weight"] @ torch.cat(padded[i : i + 3])
        )
        for i in range(len(rows))
    ]


def written(mixer, signal: Signal, old: Tensor, samples: list[float], rows: list[Tensor], first: bool) -> Tensor:
    """Return the coefficients after a chunk's gated rows are added."""
    count = len(rows)
    if first:
        if mixer.padding == "none":
            return signal.fit([(i + 1) / count for i in range(count)], rows, [])
        grid = [(i + 0.5) / count for i in range(-(count // 2), count + count // 2)]
        inside = [t for t in grid if 0 < t < 1]
        return signal.fit(inside, rows, [t for t in grid if not 0 < t < 1])
    tau, m = mixer.tau, mixer.samples
    sampled = [old.T @ signal.psi(t) for t in samples]
    places = [tau * (i + 1) / m for i in range(m)] + [tau + (1 - tau) * (i + 1) / count for i in range(count)]
    n = count + m
    grid = [] if mixer.padding == "none" else [-0.5 + 0.5 / n + i * (2 - 1 / n) / (2 * n - 1) for i in range(2 * n)]
    return signal.fit(places, [*sampled, *rows], [t for t in grid if t < 0 or t > 1])


def placed(mixer, histogram: list[float], count: int) -> list[float]:
    """Return where the signal is sampled, by the attention to each bin, after `count` chunks have been written."""
    if mixer.sticky == "random":
        shares = sorted(np.random.default_rng((mixer.seed, 0, count)).random(mixer.samples))
    else:
        shares = [(m + 0.5) / mixer.samples for m in range(mixer.samples)]
    total, found = sum(histogram), []
    for share in shares:
        # the first bin up to which there is so much attention
        ends = [i for i in range(len(histogram)) if sum(histogram[: i + 1]) >= share * total]
        found.append((ends[0] + mixer.bin_place) / len(histogram))
    return found


def run(mixer, model, weights: dict[str, Tensor], hidden: Tensor) -> Answer:
    """See the package's docstring; hidden [tokens, hidden_size]."""
    chunk, width, short = model.chunk_size, model.resolved_head_dim, mixer.short_memory or 0
    signal = Signal(mixer)
    oracle = importlib.import_module(f"tests.contract.oracles.{'transformer_xl' if short else 'local_attention'}")
    local = oracle.run(
        _Local(short or None), model, {**weights, "output.weight": torch.eye(model.heads * width).double()}, hidden
    )
    query = projected(model, weights, hidden, "query")
    coefficients = torch.zeros(mixer.basis, hidden.shape[1], dtype=torch.float64)
    histogram, samples = [0.0] * mixer.bins, [0.0] * mixer.samples
    evicted = [torch.zeros_like(hidden[0])] * chunk
    cycle = -(-mixer.restart_after // chunk) if mixer.restart_after else len(hidden)
    outputs, divergence, count = [], 0.0, 0
    for t in range(len(hidden)):
        if t % chunk == 0:
            count = max(t - short, 0) // chunk
            if count:
                places = samples if mixer.sticky != "none" else [(m + 1) / mixer.samples for m in range(mixer.samples)]
                first = (count - 1) % cycle == 0
                coefficients = written(mixer, signal, coefficients, places, gated(weights, evicted), first)
            keys, values = (heads(coefficients, weights[f"long_term.{n}.weight"], width) for n in ("key", "value"))
        read = []
        for h in range(model.heads):
            scores = [float(query[t, h] @ keys[j, h]) / math.sqrt(width) for j in range(mixer.basis)]
            looks = [
                sum(float(w) * s for w, s in zip(row, scores, strict=True)) for row in weights["long_term.focus.weight"]
            ]
            mu, var = 1 / (1 + math.exp(-looks[0])), max(math.log1p(math.exp(looks[1])), mixer.min_variance)
            z = torch.zeros(width, dtype=torch.float64)
            for j, (m, w) in enumerate(signal.bumps):
                spread = var + w * w
                z = z + values[j, h] * math.exp(-((mu - m) ** 2) / (2 * spread)) / math.sqrt(2 * math.pi * spread)
            gate = 1.0 if mixer.gate_init is None else 1 / (1 + math.exp(-float(weights["gate.logit"][h])))
            read.append(gate * z if count else torch.zeros_like(z))
            if not count:
                continue
            ratio = var / mixer.kl_width**2
            divergence += 0.5 * (ratio - math.log(ratio) - 1) / model.heads
            if mixer.kl_mean is not None:
                divergence += 0.5 * (mu - mixer.kl_mean) ** 2 / mixer.kl_width**2 / model.heads
            edges = [-1e-6, *((i + 1) / mixer.bins for i in range(mixer.bins - 1)), 1 + 1e-6]
            below = [0.5 * (1 + math.erf((edge - mu) / math.sqrt(2 * var))) for edge in edges]
            histogram = [have + b - a for have, a, b in zip(histogram, below, below[1:], strict=False)]
        outputs.append(weights["output.weight"] @ local.output[t] + weights["long_output.weight"] @ torch.cat(read))
        if (t + 1) % chunk == 0:
            begin = t + 1 - chunk - short
            evicted = list(hidden[begin : begin + chunk]) if begin >= 0 else [torch.zeros_like(hidden[0])] * chunk
            samples, histogram = placed(mixer, histogram, count), [0.0] * mixer.bins
    state = {**local.state, "coefficients": coefficients[:, None], "evicted": torch.stack(evicted)[:, None]}
    if not short:
        done = len(hidden) - len(hidden) % chunk
        state["open_hidden"] = hidden[done:, None]
    if mixer.sticky != "none":
        state["histogram"] = torch.tensor(histogram, dtype=torch.float64)[:, None]
        state["samples"] = torch.tensor(samples, dtype=torch.float64)[:, None]
    losses = {"attention_divergence": mixer.kl_weight * divergence} if mixer.kl_weight else {}
    return Answer(torch.stack(outputs), state, losses)


class _Local:
    """What the oracles of local attention and Transformer-XL read of their mixer's configuration."""

    block, same_length, clamp_length = None, False, None

    def __init__(self, memory_length: int | None) -> None:
        self.memory_length = memory_length
