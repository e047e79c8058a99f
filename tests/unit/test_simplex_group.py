"""A group of Memora's inner chunks by hand: results and gradients are those of autograd, to rounding."""

import itertools

import pytest
import torch

from megamem.ops.deep_memory.error import OutputNorm
from megamem.ops.deep_memory.simplex import SimplexNetwork, read_group
from megamem.ops.deep_memory.simplex_group import read_group_by
from megamem.ops.deep_memory.simplex_group_backward import TORCH

ROWS, HEADS, CHUNKS, TOKENS, WIDTH, INNER = 2, 3, 3, 5, 4, 12
# float64: sums over tokens are taken in another order
TOLERANCE = 1e-12


def results(read, groups, decay, norm, residual, scale, chunks=CHUNKS):
    """What is read, the logarithms after, and the gradients of everything given."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    key, value, rate = (normal(ROWS, HEADS, chunks, TOKENS, WIDTH) for _ in range(3))
    given = {
        "query": normal(ROWS, HEADS, chunks, groups, TOKENS, WIDTH),
        "key": torch.nn.functional.normalize(key, dim=-1),
        "value": value,
        "rate": 0.3 * rate.sigmoid(),
        "decay": torch.nn.functional.logsigmoid(1 + normal(ROWS, HEADS, chunks, TOKENS, WIDTH)),
        "up": normal(ROWS, HEADS, INNER, WIDTH),
        "down": normal(ROWS, HEADS, WIDTH, INNER),
        "gain": 1 + 0.3 * normal(HEADS, WIDTH),
    }
    leaves = {name: x.requires_grad_() for name, x in given.items()}
    network = SimplexNetwork(scale, residual, OutputNorm(leaves["gain"], 1e-3) if norm else None)
    tokens = [leaves[name] for name in ("query", "key", "value", "rate")]
    found = read(network, *tokens, leaves["decay"] if decay else None, leaves["up"], leaves["down"])
    total = sum((x * normal(*x.shape)).sum() for x in found)
    used = [name for name in leaves if (decay or name != "decay") and (norm or name != "gain")]
    gradients = torch.autograd.grad(total, [leaves[name] for name in used])
    return dict(zip(["read", "up after", "down after", *used], [*found, *gradients], strict=True))


@pytest.mark.parametrize(
    ("groups", "decay", "norm", "residual"),
    list(itertools.product((1, 2), (True, False), (True, False), (True, False))),
)
def test_results_and_gradients_are_those_of_autograd(groups, decay, norm, residual):
    for scale in (None, 1.5):
        form = (groups, decay, norm, residual, scale)
        expected, found = results(read_group, *form), results(read_group_by(TORCH), *form)
        assert found.keys() == expected.keys()
        for name, exact in expected.items():
            assert exact.abs().max() > 0, name
            assert (found[name] - exact).abs().max() <= TOLERANCE * exact.abs().max(), name


def test_a_group_of_one_inner_chunk():
    form = (1, True, True, True, None, 1)
    expected, found = results(read_group, *form), results(read_group_by(TORCH), *form)
    for name, exact in expected.items():
        assert (found[name] - exact).abs().max() <= TOLERANCE * exact.abs().max(), name


def test_given_gradients_and_tensors_are_left_alone():
    """The backward pass adds to its own tensors only."""
    generator = torch.Generator().manual_seed(1)
    given = [torch.randn(1, 1, 2, 4, 4, generator=generator) for _ in range(4)]
    logs = [torch.randn(1, 1, 8, 4, generator=generator), torch.randn(1, 1, 4, 8, generator=generator)]
    query, key, value, rate = given
    leaves = [query[:, :, :, None], key, value, rate.sigmoid(), -rate.sigmoid(), *logs]
    leaves = [x.detach().requires_grad_() for x in leaves]
    before = [x.detach().clone() for x in leaves]
    found = read_group_by(TORCH)(SimplexNetwork(None), *leaves)
    out = [torch.randn(x.shape, generator=generator) for x in found]
    kept = [x.clone() for x in out]
    torch.autograd.grad(found, leaves, out)
    for now, then in zip([*leaves, *out], [*before, *kept], strict=True):
        assert torch.equal(now, then)
