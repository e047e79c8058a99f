"""HiPPO-LegS in closed form: the fixed matrices of Elastic Memory.

The state of a signal after t tokens holds the coefficients of its projection on the scaled Legendre basis
g_n(x / t), g_n(x) = sqrt(2n+1) P_n(2x-1), orthonormal on [0, 1]. Zero-order hold reads token k as a signal
that is constant on [k, k+1). Under it the update of a whole block, state' = P state + K block, and the
read-out R state have closed forms, so no matrix power, exponential or product is needed
(docs/mechanisms/elastic_memory.md derives them). Everything here is computed in float64 on the CPU;
`HippoBank` stores the results in a working precision on the device that asks.

Source: "Elastic Memory", equations 5-8 and appendix E. Shapes: N = order, L = block, S = samples.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

Sampling = Literal["uniform", "exponential"]


def _legendre(order: int, first: Tensor, times_z: Callable[[Tensor], Tensor]) -> Tensor:
    """P_0 .. P_{order-1} of "z" applied to `first`, stacked on a new leading axis.

    (n+1) P_{n+1} = (2n+1) z P_n - n P_{n-1} holds for numbers and for symmetric operators alike, and is
    stable wherever z (or its spectrum) lies in [-1, 1].
    """
    rows = torch.empty(order, *first.shape, dtype=torch.float64, device="cpu")
    rows[0] = first
    if order > 1:
        rows[1] = times_z(first)
    for n in range(1, order - 1):
        torch.add((2 * n + 1) / (n + 1) * times_z(rows[n]), rows[n - 1], alpha=-n / (n + 1), out=rows[n + 1])
    return rows


def _norms(order: int) -> Tensor:
    """sqrt(2n+1), the factors that make the shifted Legendre polynomials orthonormal: [N] float64."""
    return (2 * torch.arange(order, dtype=torch.float64, device="cpu") + 1).sqrt()


def legendre_basis(order: int, x: Tensor) -> Tensor:
    """g_n(x) = sqrt(2n+1) P_n(2x-1) for x in [0, 1].

    x: [...] positions as fractions of the history. Returns [..., N] float64 on the CPU.
    """
    z = 2 * x.to("cpu", torch.float64) - 1
    return _legendre(order, torch.ones_like(z), lambda row: z * row).movedim(0, -1) * _norms(order)


def transition(order: int, start: int, stop: int) -> Tensor:
    """P = (start/stop)^A, which re-expands a state of `start` tokens over a history of `stop` tokens.

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
    """K, which adds tokens start .. stop-1 to a state: [N, stop - start] float64.

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
    total: int, samples: int, sampling: Sampling, offset: float = 0.0, alpha: float | None = None
) -> Tensor:
    """Where to read a history of `total` tokens: [S] float64 positions in tokens, within [0, total].

    uniform: x_j = j total / S. exponential: x_j = total (1 - alpha^(S-1-j)), dense near the present and in
    reverse order: sample 0 is the newest, the last one is x = 0. By default alpha = total^(-1/(S-1)), which
    puts the newest sample one token before the end; the paper gives no value. `offset`, in tokens, is added
    to each position: 0 reads the left edge of a token as the paper does, 0.5 its middle, which is far more
    accurate. Source: section 2.3 and appendix E.4.
    """
    if total < 1 or samples < 1:
        raise ValueError(f"need at least one token and one sample, got total={total}, samples={samples}")
    j = torch.arange(samples, dtype=torch.float64, device="cpu")
    if sampling == "uniform":
        points = j * total / samples
    else:
        decay = math.log(alpha) if alpha is not None else -math.log(total) / max(samples - 1, 1)
        points = -total * torch.expm1((samples - 1 - j) * decay)
    return (points + offset).clamp(0, total)


def reconstruction(order: int, total: int, points: Tensor) -> Tensor:
    """R, which reads a state of `total` tokens at `points` (in tokens): [S, N] float64. Equation 7."""
    if total < 1:
        raise ValueError("an empty history has no reconstruction")
    return legendre_basis(order, points.to("cpu", torch.float64) / total)


def _check_interval(start: int, stop: int) -> None:
    if not 0 <= start <= stop or stop == 0:
        raise ValueError(f"need 0 <= start <= stop and stop > 0, got start={start}, stop={stop}")


@dataclass(frozen=True)
class BlockMatrices:
    """The matrices of one block; the leading axis is 1 if all batch rows stand at one position, else B."""

    transition: Tensor
    """P, [1 or B, N, N]."""
    kernel: Tensor
    """K, [1 or B, N, L]."""
    reconstruction: Tensor
    """R, [1 or B, S, N], for reading the state *before* the block. Zero where that state is empty."""

    @property
    def nbytes(self) -> int:
        return self.transition.nbytes + self.kernel.nbytes + self.reconstruction.nbytes


class HippoBank:
    """Block matrices by position, built on first use and kept in a cache bounded in bytes (LRU).

    `starts` are host integers, one per batch row: the tokens the row has seen before the block. They need
    not be multiples of the block. A hit is a dictionary lookup; a miss computes on the CPU and uploads
    without waiting for the device.
    """

    def __init__(
        self,
        order: int,
        block: int,
        samples: int,
        sampling: Sampling,
        offset: float,
        alpha: float | None = None,
        *,
        max_bytes: int = 1 << 30,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if sampling not in ("uniform", "exponential"):
            raise ValueError(f"sampling must be 'uniform' or 'exponential', got {sampling!r}")
        if alpha is not None and not 0 < alpha < 1:
            raise ValueError(f"alpha must lie between 0 and 1, got {alpha}")
        self.order = order
        self.block = block
        self.samples = samples
        self.sampling: Sampling = sampling
        self.offset = offset
        self.alpha = alpha
        self.max_bytes = max_bytes
        self.dtype = dtype
        self.nbytes = 0
        """Bytes held now, over all devices."""
        self._entries: OrderedDict[tuple[tuple[int, ...], torch.device], BlockMatrices] = OrderedDict()

    def update_matrices(self, starts: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
        """(P, K) of state' = P state + K block: [1 or B, N, N] and [1 or B, N, L]."""
        entry = self.matrices(starts, device)
        return entry.transition, entry.kernel

    def reconstruction(self, starts: tuple[int, ...], device: torch.device) -> Tensor:
        """R of memory = R state, [1 or B, S, N], for states of `starts` tokens; zero where a start is 0."""
        return self.matrices(starts, device).reconstruction

    def matrices(self, starts: tuple[int, ...], device: torch.device) -> BlockMatrices:
        """All matrices of one block for a batch whose rows have seen `starts` tokens."""
        if len(set(starts)) == 1:
            starts = starts[:1]
        key = (starts, device)
        entry = self._entries.get(key)
        if entry is None:
            # A matrix first asked for under inference_mode must still be usable in training.
            with torch.inference_mode(False):
                entry = self._build(starts[0], device) if len(starts) == 1 else self._stack(starts, device)
            self._entries[key] = entry
            self.nbytes += entry.nbytes
            self._evict()
        self._entries.move_to_end(key)
        return entry

    def _evict(self) -> None:
        while self.nbytes > self.max_bytes and len(self._entries) > 1:
            _, oldest = self._entries.popitem(last=False)
            self.nbytes -= oldest.nbytes

    def _build(self, start: int, device: torch.device) -> BlockMatrices:
        stop = start + self.block
        if start == 0:
            read = torch.zeros(self.samples, self.order, dtype=torch.float64, device="cpu")
        else:
            points = sample_points(start, self.samples, self.sampling, self.offset, self.alpha)
            read = reconstruction(self.order, start, points)
        return BlockMatrices(
            self._upload(transition(self.order, start, stop), device),
            self._upload(kernel(self.order, start, stop), device),
            self._upload(read, device),
        )

    def _upload(self, matrix: Tensor, device: torch.device) -> Tensor:
        ready = matrix.to(self.dtype).contiguous()
        if device.type == "cuda":  # a copy from pageable memory makes the host wait
            ready = ready.pin_memory()
        return ready.to(device, non_blocking=True)[None]

    def _stack(self, starts: tuple[int, ...], device: torch.device) -> BlockMatrices:
        rows = [self.matrices((start,), device) for start in starts]
        return BlockMatrices(
            torch.cat([row.transition for row in rows]),
            torch.cat([row.kernel for row in rows]),
            torch.cat([row.reconstruction for row in rows]),
        )


@lru_cache(maxsize=16)
def shared_bank(
    order: int,
    block: int,
    samples: int,
    sampling: Sampling,
    offset: float,
    alpha: float | None = None,
    *,
    max_bytes: int = 1 << 30,
    dtype: torch.dtype = torch.float32,
) -> HippoBank:
    """The one bank of these hyperparameters in this process, so that layers share their matrices."""
    return HippoBank(order, block, samples, sampling, offset, alpha, max_bytes=max_bytes, dtype=dtype)
