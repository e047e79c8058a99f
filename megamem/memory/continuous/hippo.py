"""HiPPO-LegS in closed form: the fixed matrices of Elastic Memory.

The state of a signal after t tokens holds the coefficients of its projection on the scaled Legendre basis
g_n(x / t), g_n(x) = sqrt(2n+1) P_n(2x-1), orthonormal on [0, 1]. Zero-order hold reads token k as a signal
that is constant on [k, k+1). Under it the update of a whole block, state' = P state + K block, and the
read-out R state have closed forms, so no matrix power, exponential or product is needed
(docs/mechanisms/elastic_memory.md derives them). Everything here is computed in float64 on the CPU;
`megamem.memory.continuous.hippo_bank` keeps the results in a working precision on the device that asks.

Source: "Towards Compressive and Scalable Recurrent Memory" (Elastic Memory), equations 5 to 8 and appendix E.
Letters of shapes: N order, L tokens of a block, S samples.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

Sampling = Literal["uniform", "exponential", "custom"]


def _legendre(order: int, first: Tensor, times_z: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the Legendre polynomials P_0 .. P_{order-1} of "z" applied to `first` [...], stacked to [N, ...].

    times_z: multiplies by z, which is a number or an operator. (n+1) P_{n+1} = (2n+1) z P_n - n P_{n-1} holds for
        numbers and for symmetric operators alike, and is stable wherever z (or its spectrum) lies in [-1, 1].
    """
    rows = torch.empty(order, *first.shape, dtype=torch.float64, device="cpu")
    rows[0] = first
    if order > 1:
        rows[1] = times_z(first)
    for n in range(1, order - 1):
        torch.add((2 * n + 1) / (n + 1) * times_z(rows[n]), rows[n - 1], alpha=-n / (n + 1), out=rows[n + 1])
    return rows


def _norms(order: int) -> Tensor:
    """Return sqrt(2n+1), the factors that make the shifted Legendre polynomials orthonormal: [N] float64."""
    return (2 * torch.arange(order, dtype=torch.float64, device="cpu") + 1).sqrt()


def legendre_basis(order: int, x: Tensor) -> Tensor:
    """Return g_n(x) = sqrt(2n+1) P_n(2x-1) for x in [0, 1].

    x: positions as fractions of the history, any shape [...]. Returns: [..., N] float64 on the CPU.
    """
    z = 2 * x.to("cpu", torch.float64) - 1
    return _legendre(order, torch.ones_like(z), lambda row: z * row).movedim(0, -1) * _norms(order)


def transition(order: int, start: int, stop: int) -> Tensor:
    """Return P = (start/stop)^A, which re-expands a state of `start` tokens over a history of `stop` tokens.

    P[n, m] = r * integral_0^1 g_n(r x) g_m(x) dx with r = start / stop: [N, N] float64, lower triangular, of
    spectral norm at most sqrt(r), zero for start = 0. `start` and `stop` are in tokens; only their ratio
    matters.

    Row n holds the Legendre coefficients of P_n(z') for z' = r z + (r - 1), the old interval's position seen
    from the new one. Multiplication by z is the symmetric tridiagonal Jacobi matrix, so the rows follow from
    the three-term recurrence in O(N^2), exactly triangular since each step raises the degree by one.
    Source: P_i of equations 5 and 6, in closed form.
    """
    _check_interval(start, stop)
    ratio = start / stop
    m = torch.arange(1, order, dtype=torch.float64, device="cpu")
    off_diagonal = ratio * m / (4 * m * m - 1).sqrt()

    def times_z(row: Tensor) -> Tensor:
        out = row * ((start - stop) / stop)
        out[1:] += off_diagonal * row[:-1]
        out[:-1] += off_diagonal * row[1:]
        return out

    constant = torch.zeros(order, dtype=torch.float64, device="cpu")
    constant[0] = 1.0
    return _legendre(order, constant, times_z).mul_((ratio * _norms(order))[:, None])


def kernel(order: int, start: int, stop: int) -> Tensor:
    """Return K, which adds tokens start .. stop-1 to a state: [N, stop - start] float64.

    K[n, j] = integral of g_n over token j's interval [(start+j)/stop, (start+j+1)/stop], by the
    antiderivative (P_{n+1} - P_{n-1}) / (2n+1) of P_n. Source: the HiPPO kernel of equations 5 and 6, in
    closed form.
    """
    _check_interval(start, stop)
    z = 2 * torch.arange(start, stop + 1, dtype=torch.float64, device="cpu") / stop - 1
    values = _legendre(order + 1, torch.ones_like(z), lambda row: z * row)
    antiderivatives = torch.empty(order, len(z), dtype=torch.float64, device="cpu")
    antiderivatives[0] = z
    antiderivatives[1:] = (values[2:] - values[:-2]) / (_norms(order)[1:, None] ** 2)
    return antiderivatives.diff(dim=1).mul_(_norms(order)[:, None] / 2)


def sample_points(
    total: int,
    samples: int,
    sampling: Sampling,
    offset: float = 0.0,
    alpha: float | None = None,
    points: Sequence[float] = (),
) -> Tensor:
    """Return where to read a history of `total` tokens: [S] float64 positions in tokens, within [0, total].

    uniform: x_j = j total / S. exponential: x_j = total (1 - alpha^(S-1-j)), dense near the present and in
    reverse order: sample 0 is the newest, the last one is x = 0. By default alpha = total^(-1/(S-1)), which
    puts the newest sample one token before the end; the paper gives no value. custom: x_j = total points[j],
    fractions of the history, 0 the oldest token and 1 the present. `offset`, in tokens, is added to each
    position: 0 reads the left edge of a token as the paper does, 0.5 its middle, which is far more accurate.
    Source: section 2.3 and appendix E.4.
    """
    if total < 1 or samples < 1:
        raise ValueError(f"need at least one token and one sample, got total={total}, samples={samples}")
    j = torch.arange(samples, dtype=torch.float64, device="cpu")
    if sampling == "uniform":
        at = j * total / samples
    elif sampling == "custom":
        at = total * torch.tensor(list(points), dtype=torch.float64, device="cpu")
    else:
        decay = math.log(alpha) if alpha is not None else -math.log(total) / max(samples - 1, 1)
        at = -total * torch.expm1((samples - 1 - j) * decay)
    return (at + offset).clamp(0, total)


def reconstruction(order: int, total: int, points: Tensor) -> Tensor:
    """Return R, which reads a state of `total` tokens at `points` [S] (in tokens): [S, N] float64. Equation 7."""
    if total < 1:
        raise ValueError("an empty history has no reconstruction")
    return legendre_basis(order, points.to("cpu", torch.float64) / total)


def _check_interval(start: int, stop: int) -> None:
    if not 0 <= start <= stop or stop == 0:
        raise ValueError(f"need 0 <= start <= stop and stop > 0, got start={start}, stop={stop}")
