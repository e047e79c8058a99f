"""Memora's logarithms over an inner chunk, against the equation that they stand for."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megamem.ops.deep_memory.error import OutputNorm
from megamem.ops.deep_memory.simplex import ChannelRates, SimplexNetwork, simplex_memory, simplex_memory_chunks

WIDTH, INNER = 16, 64


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def sequence(tokens: int, spread: float) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor], ChannelRates]:
    """Keys and values, learned logarithms, and gates that fade fast, with decays that differ by channel."""
    key, value = (random(1, 1, tokens, WIDTH, seed=seed) for seed in (1, 2))
    logs = random(1, 1, INNER, WIDTH, seed=3) / WIDTH**0.5, random(1, 1, WIDTH, INNER, seed=4) / INNER**0.5
    # gates that fade by a hundredth
    channel, token = random(1, 1, 1, WIDTH, seed=5), random(1, 1, tokens, WIDTH, seed=6)
    log_decay = torch.nn.functional.logsigmoid(4.6 + spread * channel + 0.3 * spread * token)
    rates = ChannelRates(torch.full_like(log_decay, 0.5 / WIDTH), log_decay, torch.zeros(1, dtype=torch.int64))
    return key / key.norm(dim=-1, keepdim=True), value, logs, rates


def distribution(matrix: Tensor) -> Tensor:
    """Return rows of weights of logarithms [..., out, in]: c softmax, c the root of their number."""
    return matrix.shape[-1] ** 0.5 * matrix.softmax(-1)


def naive(key: Tensor, value: Tensor, logs: tuple[Tensor, Tensor], rates: ChannelRates, of: str) -> list[Tensor]:
    """Return W of both matrices after all tokens, gradients at the W of the start.

    of: `weights`, W_t = c softmax(a_t log W_{t-1} - b_t grad); `logarithms`, L_t = a_t L_{t-1} - b_t grad, which leaves
    each row's sum out of what fades.
    """
    start = [distribution(matrix)[0, 0].requires_grad_() for matrix in logs]
    now = [matrix[0, 0] for matrix in logs]
    for t in range(key.shape[2]):
        k, v = key[0, 0, t], value[0, 0, t]
        loss = (start[1] @ torch.nn.functional.gelu(start[0] @ k) - v).square().sum()
        up, down = torch.autograd.grad(loss, start)
        b, a = rates.rate[0, 0, t], rates.log_decay[0, 0, t].exp()
        if of == "weights":
            now = [distribution(matrix).log() for matrix in now]
        now = [a * now[0] - b * up, a[:, None] * now[1] - b[:, None] * down]
    return [distribution(matrix) for matrix in now]


def read(key: Tensor, value: Tensor, logs: tuple[Tensor, Tensor], rates: ChannelRates) -> list[Tensor]:
    """Return W of both matrices after all tokens, as one inner chunk."""
    query = torch.zeros(1, 1, 1, key.shape[2], WIDTH, dtype=torch.float64)
    _, after = simplex_memory(query, key, value, logs, rates, SimplexNetwork(None, residual=False))
    return [distribution(matrix)[0, 0] for matrix in after]


def difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest relative difference of a matrix."""
    return max(((x - y).norm() / y.norm()).item() for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_an_inner_chunk_of_one_token_is_the_equation(spread: float) -> None:
    taken = sequence(1, spread)
    assert difference(read(*taken), naive(*taken, of="weights")) < 1e-14


@pytest.mark.parametrize("tokens", [4, 16, 64])
def test_rows_with_one_decay_are_exact_in_inner_chunks_of_any_length(tokens: int) -> None:
    """Then the softmax takes any number that is added to a row out again: both readings are one."""
    key, value, logs, rates = sequence(tokens, 1.0)
    rates = rates._replace(log_decay=rates.log_decay[..., :1].expand_as(rates.rate))
    expected = naive(key, value, logs, rates, of="weights")
    assert difference(naive(key, value, logs, rates, of="logarithms"), expected) < 1e-13
    assert difference(read(key, value, logs, rates), expected) < 1e-13


@pytest.mark.parametrize(
    ("tokens", "spread", "most", "without"),
    [(16, 0.1, 3e-5, 0.015), (16, 0.5, 2e-4, 0.07), (64, 0.1, 5e-4, 0.04), (64, 0.5, 5e-3, 0.2)],
)
def test_sums_of_rows_to_first_order_are_nearly_the_equation(
    tokens: int, spread: float, most: float, without: float
) -> None:
    """The figures of docs/mechanisms/memora.md: the error that is left, and the one without the sums of the rows."""
    taken = sequence(tokens, spread)
    expected = naive(*taken, of="weights")
    assert difference(read(*taken), expected) < most
    assert difference(naive(*taken, of="logarithms"), expected) > without


def test_a_row_keeps_its_sum_to_first_order() -> None:
    """The logarithms that are kept are those of the weights themselves, up to the second order of the steps."""
    key, value, logs, rates = sequence(16, 0.1)
    query = torch.zeros(1, 1, 1, 16, WIDTH, dtype=torch.float64)
    _, after = simplex_memory(query, key, value, logs, rates, SimplexNetwork(None, residual=False))
    sums = after[0].logsumexp(-1) - math.log(WIDTH**0.5)
    assert sums.abs().max() < 0.05


@pytest.mark.parametrize("decays", [True, False], ids=["decays", "no decays"])
@pytest.mark.parametrize("single", [False, True], ids=["two matrices", "one matrix"])
@pytest.mark.parametrize("rows", [1, 2])
def test_whole_inner_chunks_are_inner_chunks_one_after_the_other(decays: bool, single: bool, rows: int) -> None:
    """Answers, logarithms and all gradients, in groups of two of the five; heads that share a memory, and a norm."""
    heads, groups, count, tokens = 2, 3, 5, 4
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    shapes = [(WIDTH, WIDTH)] if single else [(2 * WIDTH, WIDTH), (WIDTH, 2 * WIDTH)]
    of_tokens = [normal(rows, heads, count, tokens, WIDTH) for _ in range(4)]
    given = [
        normal(rows, heads, groups, count, tokens, WIDTH), *of_tokens[:2], 0.1 * of_tokens[2].sigmoid(),
        -0.1 * of_tokens[3].exp(), normal(heads, WIDTH), *(normal(rows, heads, *shape) for shape in shapes),
    ]  # fmt: skip

    def read_with(chunks: bool) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in given]
        query, key, value, rate, log_decay, weight, *logs = leaves
        network = SimplexNetwork(None, norm=OutputNorm(weight, 1e-5))
        decay = log_decay if decays else None
        if chunks:
            answered, after = simplex_memory_chunks(
                query, key, value, logs, ChannelRates(rate, decay), network, group=2
            )
        else:
            parts, after = [], tuple(logs)
            for n in range(count):
                here = [x[:, :, n] for x in (key, value)]
                rates = ChannelRates(rate[:, :, n], None if decay is None else decay[:, :, n])
                part, after = simplex_memory(query[:, :, :, n], *here, after, rates, network)
                parts.append(part)
            answered = torch.stack(parts, 3)
        made = [answered, *after]
        probes = torch.Generator().manual_seed(1)
        total = sum((x * torch.randn(x.shape, dtype=x.dtype, generator=probes)).sum() for x in made)
        wanted = [x for x in leaves if decays or x is not log_decay]
        return [*made, *torch.autograd.grad(total, wanted)]

    for found, expected in zip(read_with(True), read_with(False), strict=True):
        # float64 sums of the same terms in another order
        assert (found - expected).norm() <= 1e-12 * expected.norm()
