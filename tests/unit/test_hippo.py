"""The HiPPO matrices against the equations they replace: recurrence, projection and quadrature."""

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch

from megamem.memory.continuous.hippo import kernel, legendre_basis, reconstruction, sample_points, transition

CPU = torch.device("cpu")
ORDERS = [8, 16, 32, 64, 128]
INTERVALS = [(0, 1), (0, 64), (0, 37), (1, 2), (3, 10), (64, 128), (37, 100), (2047, 2112), (30720, 30777)]


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def gauss_legendre(nodes):
    """Nodes and weights on [0, 1]."""
    x, w = np.polynomial.legendre.leggauss(nodes)
    return (torch.from_numpy(x) + 1) / 2, torch.from_numpy(w) / 2


# --- oracles written from the equations ---


def legs_matrices(order):
    """A and B of equation 19."""
    A = torch.zeros(order, order, dtype=torch.float64)
    for n in range(order):
        for k in range(n):
            A[n, k] = math.sqrt((2 * n + 1) * (2 * k + 1))
        A[n, n] = n + 1
    B = torch.tensor([math.sqrt(2 * n + 1) for n in range(order)], dtype=torch.float64)
    return A, B


def zoh_recurrence(state, signal, start):
    """Equations 22 and 25, token by token. Step 0 forgets all: (0/1)^A = 0, as A has a positive spectrum."""
    order = len(state)
    A, B = legs_matrices(order)
    identity = torch.eye(order, dtype=torch.float64)
    for k, value in enumerate(signal, start):
        step = torch.zeros_like(A) if k == 0 else torch.linalg.matrix_exp(-A * math.log((k + 1) / k))
        drive = torch.linalg.solve_triangular(A, ((identity - step) @ B)[:, None], upper=False)
        state = step @ state + drive * value
    return state


def projection(signal, order):
    """Equation 12 for a piecewise-constant signal [T, D]: one exact quadrature per token."""
    nodes, weights = gauss_legendre(order // 2 + 1)
    positions = (torch.arange(len(signal))[:, None] + nodes) / len(signal)
    integrals = (legendre_basis(order, positions) * weights[:, None]).sum(1) / len(signal)
    return integrals.T @ signal


def rational_matrices(order, start, stop):
    """P and K in exact rational arithmetic, from the monomials of P_n(2x-1), rounded at the end."""
    r = Fraction(start, stop)
    monomials = [[(-1) ** (n + k) * math.comb(n, k) * math.comb(n + k, k) for k in range(n + 1)] for n in range(order)]
    edges = [[Fraction(j, stop) ** k for k in range(order + 1)] for j in range(start, stop + 1)]
    P, K = np.zeros((order, order)), np.zeros((order, stop - start))
    for n, row in enumerate(monomials):
        for m in range(n + 1):  # the integral of x^k P_m(2x-1) over [0, 1] is k!^2 / ((k-m)! (k+m+1)!)
            moments = [
                Fraction(math.factorial(k) ** 2, math.factorial(k - m) * math.factorial(k + m + 1))
                for k in range(m, n + 1)
            ]
            total = r * sum(row[k] * r**k * moments[k - m] for k in range(m, n + 1))
            P[n, m] = float(total) * math.sqrt((2 * n + 1) * (2 * m + 1))
        primitive = [sum(Fraction(c, k + 1) * edge[k + 1] for k, c in enumerate(row)) for edge in edges]
        steps = [float(high - low) for low, high in pairwise(primitive)]
        K[n] = np.array(steps) * math.sqrt(2 * n + 1)
    return torch.from_numpy(P), torch.from_numpy(K)


# --- the basis ---


@pytest.mark.parametrize("order", [1, 2, 3, 33])
def test_basis_is_the_scaled_legendre_polynomials(order):
    x = torch.linspace(0, 1, 23, dtype=torch.float64).reshape(1, 23)
    rows = [np.polynomial.legendre.Legendre.basis(n)(2 * x.numpy() - 1) * math.sqrt(2 * n + 1) for n in range(order)]
    basis = legendre_basis(order, x)
    assert basis.shape == (1, 23, order)
    assert basis.dtype == torch.float64
    torch.testing.assert_close(basis, torch.from_numpy(np.stack(rows, -1)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("order", [8, 128, 540])
def test_basis_is_orthonormal(order):
    nodes, weights = gauss_legendre(order)
    basis = legendre_basis(order, nodes)
    gram = basis.T @ (weights[:, None] * basis)
    torch.testing.assert_close(gram, torch.eye(order, dtype=torch.float64), rtol=0, atol=1e-11)


def test_basis_accepts_float32_positions():
    assert legendre_basis(4, torch.tensor([0.25, 0.5])).dtype == torch.float64


# --- block update ---


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("start", "stop"), INTERVALS)
def test_block_update_equals_the_token_recurrence(order, start, stop):
    state, signal = random(order, 3), random(stop - start, 3, seed=1)
    expected = zoh_recurrence(state, signal, start)
    updated = transition(order, start, stop) @ state + kernel(order, start, stop) @ signal
    torch.testing.assert_close(updated, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("start", "stop"), [(0, 5), (1, 2), (20, 27), (1000, 1003)])
def test_matrices_equal_exact_rational_arithmetic(start, stop):
    P, K = rational_matrices(48, start, stop)
    torch.testing.assert_close(transition(48, start, stop), P, rtol=0, atol=5e-15)
    torch.testing.assert_close(kernel(48, start, stop), K, rtol=0, atol=5e-15)


@pytest.mark.parametrize("order", [1, 2, 8, 128, 540])
@pytest.mark.parametrize("ratio", [(1, 2), (1, 7), (15, 16), (99_999, 100_000), (5, 5)])
def test_transition_equals_its_integral(order, ratio):
    """P[n, m] = r * integral g_n(r x) g_m(x) dx, where Gauss-Legendre with N+1 nodes is exact."""
    start, stop = ratio
    nodes, weights = gauss_legendre(order + 1)
    stretched = legendre_basis(order, nodes * start / stop)
    expected = start / stop * stretched.T @ (weights[:, None] * legendre_basis(order, nodes))
    torch.testing.assert_close(transition(order, start, stop), expected, rtol=0, atol=2e-11)


@pytest.mark.parametrize("order", [8, 128, 540])
def test_transition_is_exactly_triangular_and_contracts(order):
    for start, stop in [(1, 2), (2048, 4096), (30720, 32768)]:
        P = transition(order, start, stop)
        assert torch.equal(P, P.tril())
        norm = torch.linalg.matrix_norm(P, 2).item()
        assert norm <= math.sqrt(start / stop) * (1 + 1e-12)
        # The bound is approached exponentially in the order: a polynomial can concentrate on [0, r].
        assert norm == pytest.approx(math.sqrt(start / stop), rel=1e-12 if order > 8 else 1e-9)
        diagonal = (start / stop) ** torch.arange(1, order + 1, dtype=torch.float64)
        torch.testing.assert_close(P.diagonal(), diagonal, rtol=0, atol=1e-14)


def test_transition_edges():
    assert torch.equal(transition(8, 0, 5), torch.zeros(8, 8, dtype=torch.float64))
    torch.testing.assert_close(transition(8, 5, 5), torch.eye(8, dtype=torch.float64), rtol=0, atol=1e-15)
    assert torch.equal(transition(16, 3, 7), transition(16, 3000, 7000))


@pytest.mark.parametrize("order", [8, 128, 540])
@pytest.mark.parametrize(("a", "b", "c"), [(1, 2, 3), (2048, 4096, 6144), (777, 1000, 32768)])
def test_transitions_compose(order, a, b, c):
    composed = transition(order, b, c) @ transition(order, a, b)
    torch.testing.assert_close(composed, transition(order, a, c), rtol=0, atol=1e-12)


@pytest.mark.parametrize("order", [8, 128, 540])
@pytest.mark.parametrize(("split", "stop"), [(1, 5), (37, 101), (512, 1024)])
def test_kernel_does_not_depend_on_the_split_into_blocks(order, split, stop):
    early = transition(order, split, stop) @ kernel(order, 0, split)
    pieces = torch.cat([early, kernel(order, split, stop)], dim=1)
    torch.testing.assert_close(pieces, kernel(order, 0, stop), rtol=0, atol=1e-12)


@pytest.mark.parametrize("order", [1, 8, 128, 540])
@pytest.mark.parametrize("block", [1, 7, 512])
def test_a_constant_signal_is_the_first_coefficient(order, block):
    unit = torch.eye(order, dtype=torch.float64)[0]
    torch.testing.assert_close(kernel(order, 0, block).sum(1), unit, rtol=0, atol=1e-13)
    start, stop = 3 * block, 4 * block
    updated = transition(order, start, stop) @ unit + kernel(order, start, stop).sum(1)
    torch.testing.assert_close(updated, unit, rtol=0, atol=1e-13)


@pytest.mark.parametrize("order", [8, 33, 128, 540])
def test_state_is_the_projection_of_the_history(order):
    signal = random(4 * 75, 2)
    state = torch.zeros(order, 2, dtype=torch.float64)
    for start in range(0, 300, 75):
        P, K = transition(order, start, start + 75), kernel(order, start, start + 75)
        state = P @ state + K @ signal[start : start + 75]
    torch.testing.assert_close(state, projection(signal, order), rtol=0, atol=1e-11)


def test_float32_updates_stay_accurate_over_many_blocks():
    """P contracts, so rounding does not build up: the reason why float32 coefficients suffice."""
    order, block = 256, 128
    state, reference = torch.zeros(order, 4), torch.zeros(order, 4, dtype=torch.float64)
    for index in range(64):
        signal = random(block, 4, seed=index)
        start, stop = index * block, (index + 1) * block
        P, K = transition(order, start, stop), kernel(order, start, stop)
        state = P.float() @ state + K.float() @ signal.float()
        reference = P @ reference + K @ signal
    assert (state - reference).norm() / reference.norm() < 1e-5


@pytest.mark.parametrize(("start", "stop"), [(-1, 4), (5, 4), (0, 0)])
def test_bad_intervals_are_refused(start, stop):
    with pytest.raises(ValueError, match="start"):
        transition(4, start, stop)
    with pytest.raises(ValueError, match="start"):
        kernel(4, start, stop)


# --- reading ---


@pytest.mark.parametrize("order", [1, 8, 128, 540])
def test_noise_gain_at_the_present_is_the_order(order):
    R = reconstruction(order, 2048, torch.tensor([2048.0]))
    torch.testing.assert_close(R.norm(), torch.tensor(float(order), dtype=torch.float64), rtol=1e-12, atol=0)


def test_polynomials_below_the_order_are_read_back():
    """Up to the steps of the hold: a token's middle errs in second order of its length, its edge in first."""
    coefficients = random(6, 1)
    errors = {0.0: [], 0.5: []}
    for total in (512, 1024):
        middles = (torch.arange(total, dtype=torch.float64) + 0.5) / total
        signal = legendre_basis(6, middles) @ coefficients
        state = kernel(16, 0, total) @ signal
        for offset, history in errors.items():
            points = torch.arange(total, dtype=torch.float64) + offset
            history.append((reconstruction(16, total, points) @ state - signal).square().mean().sqrt().item())
    assert errors[0.5][1] < 1e-3 < 1e-2 < errors[0.0][1]
    assert errors[0.5][0] / errors[0.5][1] == pytest.approx(4, rel=0.1)
    assert errors[0.0][0] / errors[0.0][1] == pytest.approx(2, rel=0.1)


# --- sampling ---


def test_uniform_samples():
    points = sample_points(100, 5, "uniform")
    assert points.tolist() == [0.0, 20.0, 40.0, 60.0, 80.0]
    assert sample_points(100, 5, "uniform", offset=0.5).tolist() == [0.5, 20.5, 40.5, 60.5, 80.5]
    assert points.dtype == torch.float64


def test_exponential_samples_run_backwards_in_time():
    points = sample_points(16, 5, "exponential", alpha=0.5)
    assert points.tolist() == pytest.approx([15.0, 14.0, 12.0, 8.0, 0.0], abs=1e-12)
    gaps = -sample_points(32768, 512, "exponential").diff()
    assert (gaps > 0).all()
    assert (gaps.diff() > 0).all()


@pytest.mark.parametrize(("total", "samples"), [(2048, 512), (32768, 512), (7, 3)])
def test_default_alpha_puts_the_newest_sample_one_token_from_the_end(total, samples):
    points = sample_points(total, samples, "exponential")
    assert points[0].item() == pytest.approx(total - 1, abs=1e-9)
    assert points[-1].item() == 0.0
    explicit = sample_points(total, samples, "exponential", alpha=total ** (-1 / (samples - 1)))
    torch.testing.assert_close(points, explicit, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("sampling", ["uniform", "exponential"])
@pytest.mark.parametrize(("total", "samples"), [(1, 1), (1, 8), (5, 1), (3, 512)])
@pytest.mark.parametrize("offset", [0.0, 0.5, 2.0, -1.0])
def test_samples_stay_inside_the_history(sampling, total, samples, offset):
    points = sample_points(total, samples, sampling, offset)
    assert points.shape == (samples,)
    assert points.isfinite().all()
    assert ((points >= 0) & (points <= total)).all()


def test_custom_samples_are_fractions_of_the_history():
    assert sample_points(40, 3, "custom", 0.5, points=(1.0, 0.25, 0.0)).tolist() == [40.0, 10.5, 0.5]


def test_an_empty_history_cannot_be_read():
    with pytest.raises(ValueError, match="at least one"):
        sample_points(0, 4, "uniform")
    with pytest.raises(ValueError, match="empty"):
        reconstruction(4, 0, torch.zeros(1))
