"""The dual form against a loop that trains the small network token by token with autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megamem.ops.deep_memory.error import OutputNorm
from megamem.ops.deep_memory.kept_networks import Spans, kept_networks
from megamem.ops.deep_memory.network import InnerRates, Weights, deep_memory
from megamem.ops.deep_memory.pointwise import gelu_curve, gelu_slope

BATCH, HEADS, GROUPS, WIDTH, INNER = 2, 2, 2, 5, 7
FORMS = {
    "dla": ("dot", False, False),
    "dla, decay": ("dot", True, False),
    "titans": ("l2", True, True),
    "l2, no momentum": ("l2", True, False),
}
NETWORKS = {
    "network": [(INNER, WIDTH), (WIDTH, INNER)],
    "matrix": [(WIDTH, WIDTH)],
}


NORM = OutputNorm(torch.tensor([[0.5, 1.0, 1.5, -1.0, 2.0], [1.0] * WIDTH], dtype=torch.float64), eps=1e-3)
"""A weight of its own for each channel of the first head."""


def drawn(tokens: int, form: str, network: str) -> tuple[dict[str, Tensor], Weights, Weights | None, InnerRates]:
    _, decay, momentum = FORMS[form]
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    def share() -> Tensor:
        return torch.rand(BATCH, HEADS, tokens, dtype=torch.float64, generator=generator)

    def matrices() -> Weights:
        return tuple(normal(BATCH, HEADS, *shape) / 2 for shape in NETWORKS[network])

    inputs = {
        "query": normal(BATCH, HEADS, GROUPS, tokens, WIDTH),
        "key": F.normalize(normal(BATCH, HEADS, tokens, WIDTH), dim=-1),
        "value": normal(BATCH, HEADS, tokens, WIDTH),
    }
    rates = InnerRates(
        0.02 * share(),  # larger ones make the inner training diverge, and differences in rounding with it
        (0.8 + 0.2 * share()).log() if decay else None,
        (0.5 + 0.4 * share()).log() if momentum else None,
    )
    return inputs, matrices(), matrices() if momentum else None, rates


def answer(weights, x, residual, norm, h):
    """M(x) of one vector."""
    read = weights[-1] @ (x if len(weights) == 1 else F.gelu(weights[0] @ x))
    if norm is not None:
        read = F.layer_norm(read, (WIDTH,), norm.weight[h], eps=norm.eps)
    return x + read if residual else read


def loop(query, key, value, weights, momentum, rates, loss, inner, residual, norm):
    """One token, one head at a time; gradients at the weights of the inner chunk's start."""
    tokens = key.shape[2]
    reads = torch.zeros(BATCH, HEADS, GROUPS, tokens, WIDTH, dtype=torch.float64)
    ends = []
    for b in range(BATCH):
        for h in range(HEADS):
            now = [matrix[b, h] for matrix in weights]
            carried = [torch.zeros_like(w) for w in now] if momentum is None else [m[b, h] for m in momentum]
            for t in range(tokens):
                if t % inner == 0:
                    start = [w.detach().clone().requires_grad_() for w in now]
                predicted, target = answer(start, key[b, h, t], residual, norm, h), value[b, h, t]
                wrong = -(predicted @ target) if loss == "dot" else (predicted - target).square().sum()
                steps = torch.autograd.grad(wrong, start)
                e = 0.0 if rates.log_momentum is None else rates.log_momentum[b, h, t].exp()
                a = 1.0 if rates.log_decay is None else rates.log_decay[b, h, t].exp()
                carried = [e * s - rates.rate[b, h, t] * g for s, g in zip(carried, steps, strict=True)]
                now = [a * w + s for w, s in zip(now, carried, strict=True)]
                for g in range(GROUPS):
                    reads[b, h, g, t] = answer(now, query[b, h, g, t], residual, norm, h)
            ends.append((now, carried))
    return reads, ends


def cut(rates: InnerRates, part: slice) -> InnerRates:
    return InnerRates(*(None if x is None else x[..., part] for x in rates))


def agree(found, exact, tolerance):
    torch.testing.assert_close(found, exact, rtol=0, atol=tolerance)


@pytest.mark.parametrize("norm", [None, NORM], ids=["", "normalized"])
@pytest.mark.parametrize("residual", [True, False], ids=["residual", "plain"])
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("inner", [1, 4, 16])
def test_it_is_the_token_by_token_loop(form: str, inner: int, network: str, residual: bool, norm) -> None:
    """1e-10: 37 tokens, weights of the order of one."""
    loss = FORMS[form][0]
    inputs, weights, carried, rates = drawn(37, form, network)
    exact, ends = loop(
        **inputs, weights=weights, momentum=carried, rates=rates, loss=loss, inner=inner, residual=residual, norm=norm
    )
    reads = []
    for begin in range(0, 37, inner):
        part = slice(begin, begin + inner)
        tokens = (inputs[name][..., part, :] for name in ("query", "key", "value"))
        read, weights, carried = deep_memory(*tokens, weights, carried, cut(rates, part), loss, residual, norm)
        reads.append(read)
    agree(torch.cat(reads, dim=3), exact, 1e-10)
    for place, (last, momenta) in enumerate(ends):
        b, h = divmod(place, HEADS)
        for ours, theirs in zip(weights, last, strict=True):
            agree(ours[b, h], theirs, 1e-10)
        for ours, theirs in zip(carried or (), momenta, strict=carried is not None):
            agree(ours[b, h], theirs, 1e-10)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("form", FORMS)
def test_an_inner_chunk_may_be_read_in_parts(form: str, network: str) -> None:
    """As decoding does: the tokens before wait, with their keys and values."""
    loss = FORMS[form][0]
    inputs, weights, carried, rates = drawn(9, form, network)
    query, key, value = inputs["query"], inputs["key"], inputs["value"]
    whole, after, _ = deep_memory(query, key, value, weights, carried, rates, loss, norm=NORM)
    for tokens in range(1, 10):
        so_far = slice(0, tokens)
        read, last, _ = deep_memory(
            query[..., tokens - 1 : tokens, :], key[..., so_far, :], value[..., so_far, :], weights, carried,
            cut(rates, so_far), loss, norm=NORM,
        )  # fmt: skip
        agree(read, whole[..., tokens - 1 : tokens, :], 1e-12)
    agree(last[0], after[0], 1e-12)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("form", FORMS)
def test_tokens_that_are_not_seen_leave_no_trace(form: str, network: str) -> None:
    loss = FORMS[form][0]
    inputs, weights, carried, rates = drawn(8, form, network)
    seen = torch.ones_like(rates.rate)
    seen[..., :3] = 0
    hidden = InnerRates(*(None if x is None else x * seen for x in rates[:3]), seen)
    query, key, value = inputs["query"], inputs["key"], inputs["value"]
    alone = slice(3, None)
    expected = deep_memory(
        query[..., alone, :], key[..., alone, :], value[..., alone, :], weights, carried, cut(rates, alone), loss,
        norm=NORM,
    )  # fmt: skip
    found = deep_memory(query[..., alone, :], key, value, weights, carried, hidden, loss, norm=NORM)
    agree(found[0], expected[0], 1e-12)
    for ours, theirs in zip(found[1], expected[1], strict=True):
        agree(ours, theirs, 1e-12)
    for ours, theirs in zip(found[2] or (), expected[2] or (), strict=True):
        agree(ours, theirs, 1e-12)


def test_slope_and_curve_are_gelu_s_derivatives() -> None:
    x = torch.linspace(-6, 6, 200, dtype=torch.float64, requires_grad=True)
    (exact,) = torch.autograd.grad(F.gelu(x).sum(), x, create_graph=True)
    slope = gelu_slope(x)
    agree(slope, exact, 1e-14)
    (curve,) = torch.autograd.grad(exact.sum(), x)
    agree(gelu_curve(x), curve, 1e-14)
    agree(torch.autograd.grad(slope.sum(), x)[0], curve, 1e-14)


@pytest.mark.parametrize("eps", [None, 1e-3])
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("spans", [(), ((0, 4), (1, 4), (3, 4)), ((2, 3), (4, 4), (0, 3))])
def test_kept_networks_answer_as_each_by_itself(spans: Spans, network: str, eps: float | None) -> None:
    """The sum that weighs their answers, and its gradients, against autograd through one network and head at a time.

    Numbers are of the order of ten: 1e-12.
    """
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    count, tokens = 3, 4
    x, shares = normal(BATCH, HEADS, GROUPS, tokens, WIDTH), normal(BATCH, HEADS, GROUPS, tokens, count)
    inner = INNER if network == "network" else WIDTH
    matrices = [normal(BATCH, HEADS, count, inner, WIDTH) for _ in NETWORKS[network]]

    def exact() -> Tensor:
        """Return the answers, summed network by network."""
        rows = []
        for b in range(BATCH):
            for h in range(HEADS):
                total: Tensor | float = 0.0
                for n in range(count):
                    made = x[b, h] @ matrices[0][b, h, n].T
                    made = F.gelu(made) @ matrices[1][b, h, n] if len(matrices) == 2 else made
                    if eps is not None:
                        made = (made - made.mean(-1, keepdim=True)) / (
                            made.var(-1, correction=0, keepdim=True) + eps
                        ) ** 0.5
                    begin, end = spans[n] if spans else (0, tokens)
                    reads = torch.tensor([begin <= t < end for t in range(tokens)])[:, None]
                    total = total + torch.where(reads, shares[b, h, ..., n, None] * made, 0.0)
                rows.append(total)
        return torch.stack(rows).unflatten(0, (BATCH, HEADS))

    given = (x, shares, *matrices)
    weigh = normal(BATCH, HEADS, GROUPS, tokens, WIDTH).detach()
    found, expected = kept_networks(x, matrices, shares, eps, spans), exact()
    agree(found, expected, 1e-12)
    for ours, theirs in zip(
        torch.autograd.grad((found * weigh).sum(), given),
        torch.autograd.grad((expected * weigh).sum(), given),
        strict=True,
    ):
        agree(ours, theirs, 1e-12)
