"""The infinity-former's basis, regression and reading against direct computations; sticky samples; what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.polynomial.legendre import leggauss

from megamem.config.load import parse_config
from megamem.config.model import ModelConfig
from megamem.errors import ConfigError
from megamem.memory.continuous.gaussian_basis import Basis, Padding, Regression, expected_basis, operators
from megamem.memory.continuous.infinity_former import InfinityFormer
from megamem.ops.attention.continuous import continuous_attention
from megamem.parallel.linears import PlainLinears, initialize_parameters

BASIS = Basis(12, (0.03, 0.1))
BASIS_SHAPE = (torch.linspace(0, 1, 6, dtype=torch.float64), torch.tensor([0.03, 0.1], dtype=torch.float64) ** 2)
CPU = torch.device("cpu")


def model_of(**options: object) -> ModelConfig:
    mixer = {"kind": "infinity_former", "basis": 12, "widths": [0.03, 0.1], "samples": 7, **options}
    tree = {
        "layers": 1, "hidden_size": 16, "heads": 2, "ffn_size": 24, "vocab_size": 32, "chunk_size": 8, "mixer": mixer,
    }  # fmt: skip
    return parse_config(ModelConfig, tree, "test")


@pytest.mark.parametrize(("mean", "variance"), [(0.5, 1e-3), (0.02, 0.09), (0.97, 1e-6), (0.3, 2.0)])
def test_expectations_equal_numerical_quadrature(mean: float, variance: float) -> None:
    """The integral of N(t; mean, variance) psi_j(t) over the line, by Gauss-Legendre rules over 400 pieces."""
    nodes, weights = leggauss(20)
    reach = 12 * math.sqrt(variance)
    edges = np.linspace(mean - reach, mean + reach, 401)
    half = (edges[1:] - edges[:-1]) / 2
    t = torch.from_numpy((half[:, None] * nodes + (edges[1:] + edges[:-1])[:, None] / 2).ravel())
    w = torch.from_numpy((half[:, None] * weights).ravel())
    density = torch.exp(-((t - mean) ** 2) / (2 * variance)) / math.sqrt(2 * math.pi * variance)
    quadrature = (w * density) @ BASIS.values(t)
    centers, widths = BASIS.centers_and_widths()
    looks = (torch.tensor(value, dtype=torch.float64) for value in (mean, variance))
    closed = expected_basis(*looks, centers, widths**2)
    assert (closed - quadrature).abs().max() < 1e-8
    look = (torch.tensor([[[value]]], dtype=torch.float64) for value in (mean, variance))
    identity = torch.eye(BASIS.count, dtype=torch.float64)[None, None]
    assert (continuous_attention(*look, identity, *BASIS_SHAPE).flatten() - quadrature).abs().max() < 1e-8


def test_continuous_attention_has_the_gradients_of_its_closed_form() -> None:
    """Against the expectations that torch differentiates itself; rounding of sums over the basis."""
    generator = torch.Generator().manual_seed(0)
    mean, noise = torch.rand((2, 2, 3, 5), generator=generator, dtype=torch.float64)
    value = torch.randn((2, 3, BASIS.count, 4), generator=generator, dtype=torch.float64)
    given = [x.requires_grad_() for x in (mean, 1e-4 + 0.1 * noise, value)]
    centers, widths = BASIS.centers_and_widths()
    found = []
    for out in (
        continuous_attention(*given, *BASIS_SHAPE),
        expected_basis(given[0], given[1], centers, widths**2) @ given[2],
    ):
        found.append((out, *torch.autograd.grad(out.square().sum(), given)))
    for ours, whole in zip(*found, strict=True):
        assert (ours - whole).abs().max() < 1e-12 * whole.abs().max()


@pytest.mark.parametrize("padding", ["none", "zeros"])
@pytest.mark.parametrize("ridge", [1.0, 1e-3])
def test_the_operators_equal_a_direct_solve(padding: Padding, ridge: float) -> None:
    """Least squares over the places and sqrt(lambda) I below them, which never forms F F^T."""
    regression = Regression(BASIS, ridge, tokens=9, samples=7, contraction=0.6, padding=padding)
    matrices = operators(regression, torch.float64, CPU)
    vectors = torch.randn(16, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    first, around = regression.first_places()
    old, new, beyond = regression.later_places()
    for rows, places, zeros, ours in (
        (vectors[:9], first, around, matrices.first @ vectors[:9]),
        (vectors, torch.cat((old, new)), beyond, matrices.old @ vectors[:7] + matrices.new @ vectors[7:]),
    ):
        design = torch.cat((BASIS.values(torch.cat((places, zeros))), math.sqrt(ridge) * torch.eye(12).double()))
        wanted = torch.cat((rows, torch.zeros(len(design) - len(rows), 5, dtype=torch.float64)))
        direct = torch.linalg.lstsq(design, wanted).solution
        assert (ours - direct).abs().max() < 1e-10 * max(1.0, float(direct.abs().max()))
    sampled = BASIS.values(old / 0.6) @ direct
    assert (matrices.contract @ direct - matrices.old @ sampled).abs().max() < 1e-10


def test_first_places_lie_in_the_middle_of_their_intervals_among_zeros() -> None:
    for tokens in (4, 5):  # the authors' code needs an even number
        first, around = Regression(BASIS, 1.0, tokens, 3, 0.5, "zeros").first_places()
        assert first.tolist() == pytest.approx([(i + 0.5) / tokens for i in range(tokens)], abs=1e-15)
        assert around.min() >= -0.5
        assert around.max() <= 1.5
        assert len(around) == 2 * (tokens // 2)


def test_a_smooth_signal_is_kept_for_many_chunks() -> None:
    """A slow wave over ten chunks of 64, held by 64 coefficients: within a tenth of its amplitude at both ends."""
    regression = Regression(Basis(64, (0.01, 0.05)), 0.5, 64, 128, 0.75, "none")
    matrices = operators(regression, torch.float64, CPU)
    wave = torch.sin(torch.arange(640).double() * 2 * math.pi / 640)[:, None]
    chunks = wave.split(64)
    coefficients = matrices.first @ chunks[0]
    for chunk in chunks[1:]:
        coefficients = matrices.contract @ coefficients + matrices.new @ chunk
    newest = 0.75 + 0.25 * torch.arange(1, 65).double() / 64
    oldest = 0.75**9 * torch.arange(1, 65).double() / 64
    values = regression.basis.values(torch.cat((newest, oldest))) @ coefficients
    assert (values - torch.cat((chunks[-1], chunks[0]))).abs().max() < 0.1


def long_term(**options: object) -> InfinityFormer:
    model = model_of(**options)
    mixer = model.mixer.build(model, PlainLinears(), 0)
    initialize_parameters(mixer, 1)
    assert isinstance(mixer, InfinityFormer)
    return mixer.double()


def test_samples_follow_the_attention() -> None:
    """10,000 samples of four bins: within four standard deviations of their shares; `spread` within one sample."""
    shares = torch.tensor([[0.1], [0.0], [0.6], [0.3]], dtype=torch.float64)
    for sticky, allowed in (("random", 4 * math.sqrt(0.25 / 10_000)), ("spread", 1.0 / 10_000)):
        memory = long_term(sticky=sticky, bins=4, samples=10_000).long_term
        places = memory.samples(shares, [3])[:, 0]
        assert bool((places.diff() >= 0).all())
        for bin_, share in enumerate((0.1, 0.0, 0.6, 0.3)):
            found = float((places == (bin_ + 0.5) / 4).double().mean())
            assert abs(found - share) <= allowed + 1e-12, (sticky, bin_)


def test_draws_depend_on_seed_layer_and_update_alone() -> None:
    shares = torch.ones(128, 3, dtype=torch.float64)
    memory = long_term(sticky="random", samples=50).long_term
    first = memory.samples(shares, [1, 1, 2])
    assert torch.equal(first[:, 0], first[:, 1])
    assert not torch.equal(first[:, 0], first[:, 2])
    assert torch.equal(first, memory.samples(shares, [1, 1, 2]))
    assert not torch.equal(first, long_term(sticky="random", samples=50, seed=1).long_term.samples(shares, [1, 1, 2]))


def test_the_histogram_is_the_probability_of_each_bin() -> None:
    memory = long_term(sticky="spread", bins=5).long_term
    mean, variance = (
        torch.full((1, 1, 2), 0.5, dtype=torch.float64),
        torch.tensor([[[0.04, 1e-6]]], dtype=torch.float64),
    )
    found = memory._histogram(mean, variance)[:, 0]
    edges = [-1e-6, 0.2, 0.4, 0.6, 0.8, 1 + 1e-6]
    normal = [0.5 * (1 + math.erf((edge - 0.5) / 0.2 / math.sqrt(2))) for edge in edges]
    expected = np.diff(normal) + np.array([0, 0, 1, 0, 0])  # the second query looks at one point
    assert np.abs(found.numpy() - expected).max() < 1e-12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tau": 1.0}, "tau 1 is not between 0 and 1"),
        ({"tau": 0.0}, "tau 0 is not between 0 and 1"),
        ({"basis": 13}, "basis 13 with 2 widths"),
        ({"basis": 2}, "basis 2 with 2 widths"),
        ({"basis": 64, "widths": [0.5, 0.6], "ridge": 1e-9}, r"ill-conditioned \(condition number \d\.\de\+1\d"),
        ({"short_memory": 12}, "short_memory 12 is no multiple of model.chunk_size 8.*use 8"),
        ({"bins": 12}, "bins is for sticky memories, but sticky is none"),
        ({"sticky": "random", "bins": 0}, "sticky random with bins 0: sticky memories draw from a histogram"),
        ({"seed": 3}, "seed is for sticky memories"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model_of(**options)
