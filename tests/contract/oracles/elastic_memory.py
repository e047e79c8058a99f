"""Elastic Memory, one token of the recurrence at a time.

State:  C_k = Abar_k C_{k-1} + Bbar_k f_k  for every channel f of the keys and values before rotation, with
        A[n, m] = sqrt((2n+1)(2m+1)) for n > m, n + 1 for n = m;  B[n] = sqrt(2n+1);
        Abar_k = (k / (k+1))^A = exp(A ln(k / (k+1))),  Bbar_k = A^-1 (I - Abar_k) B;  Abar_0 = 0, Bbar_0 = e_0.
        The approximate rules, I + A/k and so on below, start from C_0 = e_0 f_0 too.
Read:   memory token j of a history of t tokens is sum_n sqrt(2n+1) P_n(2 x_j / t - 1) C[n].
With first_token 1 all times k and t are one more than the numbers of tokens, and C is zero before the first one.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.polynomial import legendre
from torch import Tensor

from tests.contract.oracles.common import Answer, attend, columns, projected, rotary


def transition(rule: str, order: int, k: int) -> tuple[Tensor, Tensor]:
    """Return Abar_k [order, order] and Bbar_k [order] of a rule."""
    if k == 0:
        first = torch.zeros(order, dtype=torch.float64)
        first[0] = 1.0
        return torch.zeros(order, order, dtype=torch.float64), first
    A = torch.zeros(order, order, dtype=torch.float64)
    for n in range(order):
        for m in range(n):
            A[n, m] = math.sqrt((2 * n + 1) * (2 * m + 1))
        A[n, n] = n + 1
    B = torch.tensor([math.sqrt(2 * n + 1) for n in range(order)], dtype=torch.float64)
    one = torch.eye(order, dtype=torch.float64)
    if rule == "zoh":
        Abar = torch.linalg.matrix_exp(A * math.log(k / (k + 1)))
        return Abar, torch.linalg.solve(A, (one - Abar) @ B)
    if rule == "forward":
        return one - A / k, B / k
    if rule == "backward":
        inverse = torch.linalg.inv(one + A / k)
        return inverse, inverse @ B / k
    inverse = torch.linalg.inv(one + A / (2 * k))  # bilinear
    return inverse @ (one - A / (2 * k)), inverse @ B / k


def points(mixer, t: int) -> list[float]:
    """Return the sampled moments of a history that ends at time t."""
    count = mixer.samples or min(mixer.order, 512)
    if mixer.sampling == "custom":
        return [min(t * point + mixer.sample_offset, t) for point in mixer.points]
    if mixer.sampling == "uniform":
        at = [j * t / count for j in range(count)]
    else:
        alpha = mixer.alpha or t ** (-1 / (count - 1))
        at = [t * (1 - alpha ** (count - 1 - j)) for j in range(count)]
    return [min(max(x + mixer.sample_offset, 0), t) for x in at]


def read(mixer, coefficients: Tensor, t: int) -> Tensor:
    """Return memory tokens [samples, 2, kv_heads, width] of coefficients [order, 2, kv_heads, width] at time t."""
    rows = []
    for x in points(mixer, t):
        basis = [
            math.sqrt(2 * n + 1) * legendre.legval(2 * x / t - 1, np.eye(mixer.order)[n]) for n in range(mixer.order)
        ]
        rows.append(sum(b * c for b, c in zip(basis, coefficients, strict=True)))
    return torch.stack(rows)


def run(mixer, model, weights: dict[str, Tensor], hidden: Tensor) -> Answer:
    """See the package's docstring; hidden [tokens, hidden_size]."""
    block = mixer.block or model.chunk_size
    query, key, value = (projected(model, weights, hidden, n) for n in ("query", "key", "value"))
    coefficients = torch.zeros(mixer.order, 2, model.resolved_kv_heads, model.resolved_head_dim, dtype=torch.float64)
    memory, output = None, []
    for t in range(len(hidden)):
        first = t - t % block
        mixed = []
        for h in range(model.heads):
            g = h // (model.heads // model.resolved_kv_heads)
            q = rotary(query[t, h], t - first, model.rope_theta)
            keys = [rotary(key[j, g], j - first, model.rope_theta) for j in range(first, t + 1)]
            values = [value[j, g] for j in range(first, t + 1)]
            if memory is not None:
                keys, values = [*memory[:, 0, g], *keys], [*memory[:, 1, g], *values]
            mixed.append(attend(q, keys, values))
        output.append(weights["output.weight"] @ torch.cat(mixed))
        if (t + 1) % block == 0:
            for k in range(first, t + 1):
                Abar, Bbar = transition(mixer.discretization, mixer.order, k + mixer.first_token)
                token = torch.stack((key[k], value[k]))
                coefficients = torch.einsum("nm,mchw->nchw", Abar, coefficients) + torch.einsum(
                    "n,chw->nchw", Bbar, token
                )
            memory = read(mixer, coefficients, t + 1 + mixer.first_token)
    done = len(hidden) - len(hidden) % block
    state = {
        "coefficients": coefficients[None],
        "open_keys": columns(key, done, len(hidden)),
        "open_values": columns(value, done, len(hidden)),
    }
    return Answer(torch.stack(output), state)
