"""The dual form against a loop that trains the small network token by token with autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megamem.ops.deep_memory import Network, Pace, deep_memory, gelu_slope

BATCH, HEADS, GROUPS, WIDTH, INNER = 2, 2, 2, 5, 7
FORMS = {"dla": ("dot", False, False), "dla, decay": ("dot", True, False), "titans": ("l2", True, True)}


def drawn(tokens: int, decay: bool, momentum: bool) -> tuple[dict[str, Tensor], Network, Network | None, Pace]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    def share() -> Tensor:
        return torch.rand(BATCH, HEADS, tokens, dtype=torch.float64, generator=generator)

    inputs = {
        "query": normal(BATCH, HEADS, GROUPS, tokens, WIDTH),
        "key": F.normalize(normal(BATCH, HEADS, tokens, WIDTH), dim=-1),
        "value": normal(BATCH, HEADS, tokens, WIDTH),
    }

    def network() -> Network:
        return Network(normal(BATCH, HEADS, INNER, WIDTH) / 2, normal(BATCH, HEADS, WIDTH, INNER) / 2)

    pace = Pace(
        0.05 * share(),  # larger ones make the inner training diverge
        (0.8 + 0.2 * share()).log() if decay else None,
        (0.5 + 0.4 * share()).log() if momentum else None,
    )
    return inputs, network(), network() if momentum else None, pace


def loop(query, key, value, network, momentum, pace, loss, inner):
    """One token, one head at a time; gradients at the weights of the inner chunk's start."""
    tokens = key.shape[2]
    reads = torch.zeros(BATCH, HEADS, GROUPS, tokens, WIDTH, dtype=torch.float64)
    ends = []
    for b in range(BATCH):
        for h in range(HEADS):
            weights = [network.up[b, h], network.down[b, h]]
            carried = (
                [torch.zeros_like(w) for w in weights] if momentum is None else [momentum.up[b, h], momentum.down[b, h]]
            )
            for t in range(tokens):
                if t % inner == 0:
                    start = [w.detach().clone().requires_grad_() for w in weights]
                predicted = key[b, h, t] + start[1] @ F.gelu(start[0] @ key[b, h, t])
                target = value[b, h, t]
                wrong = -(predicted @ target) if loss == "dot" else (predicted - target).square().sum()
                steps = torch.autograd.grad(wrong, start)
                e = 0.0 if pace.log_momentum is None else pace.log_momentum[b, h, t].exp()
                a = 1.0 if pace.log_decay is None else pace.log_decay[b, h, t].exp()
                carried = [e * s - pace.rate[b, h, t] * g for s, g in zip(carried, steps, strict=True)]
                weights = [a * w + s for w, s in zip(weights, carried, strict=True)]
                for g in range(GROUPS):
                    q = query[b, h, g, t]
                    reads[b, h, g, t] = q + weights[1] @ F.gelu(weights[0] @ q)
            ends.append((weights, carried))
    return reads, ends


def cut(pace: Pace, part: slice) -> Pace:
    return Pace(*(None if x is None else x[..., part] for x in pace))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("inner", [1, 4, 16])
def test_it_is_the_token_by_token_loop(form: str, inner: int) -> None:
    """1e-10: 37 tokens, weights of the order of one."""
    loss, decay, momentum = FORMS[form]
    inputs, network, carried, pace = drawn(37, decay, momentum)
    exact, ends = loop(**inputs, network=network, momentum=carried, pace=pace, loss=loss, inner=inner)
    reads = []
    for begin in range(0, 37, inner):
        part = slice(begin, begin + inner)
        read, network, carried = deep_memory(
            *(inputs[name][..., part, :] for name in ("query", "key", "value")), network, carried, cut(pace, part), loss
        )
        reads.append(read)
    torch.testing.assert_close(torch.cat(reads, dim=3), exact, rtol=0, atol=1e-10)
    for place, (weights, momenta) in enumerate(ends):
        b, h = divmod(place, HEADS)
        torch.testing.assert_close(network.up[b, h], weights[0], rtol=0, atol=1e-10)
        torch.testing.assert_close(network.down[b, h], weights[1], rtol=0, atol=1e-10)
        if carried is not None:
            torch.testing.assert_close(carried.up[b, h], momenta[0], rtol=0, atol=1e-10)
            torch.testing.assert_close(carried.down[b, h], momenta[1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
def test_an_inner_chunk_may_be_read_in_parts(form: str) -> None:
    """As decoding does: the tokens before wait, with their keys and values."""
    loss, decay, momentum = FORMS[form]
    inputs, network, carried, pace = drawn(9, decay, momentum)
    query, key, value = inputs["query"], inputs["key"], inputs["value"]
    whole, after, _ = deep_memory(query, key, value, network, carried, pace, loss)
    for tokens in range(1, 10):
        so_far = slice(0, tokens)
        read, last, _ = deep_memory(
            query[..., tokens - 1 : tokens, :], key[..., so_far, :], value[..., so_far, :], network, carried,
            cut(pace, so_far), loss,
        )  # fmt: skip
        torch.testing.assert_close(read, whole[..., tokens - 1 : tokens, :], rtol=0, atol=1e-12)
    torch.testing.assert_close(last.up, after.up, rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_tokens_that_are_not_seen_leave_no_trace(form: str) -> None:
    loss, decay, momentum = FORMS[form]
    inputs, network, carried, pace = drawn(8, decay, momentum)
    seen = torch.ones_like(pace.rate)
    seen[..., :3] = 0
    hidden = Pace(*(None if x is None else x * seen for x in pace[:3]), seen)
    query, key, value = inputs["query"], inputs["key"], inputs["value"]
    alone = slice(3, None)
    expected = deep_memory(
        query[..., alone, :], key[..., alone, :], value[..., alone, :], network, carried, cut(pace, alone), loss
    )
    found = deep_memory(query[..., alone, :], key, value, network, carried, hidden, loss)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(found[1].down, expected[1].down, rtol=0, atol=1e-12)
    if momentum:
        torch.testing.assert_close(found[2].up, expected[2].up, rtol=0, atol=1e-12)


def test_slope_is_gelu_s_derivative() -> None:
    x = torch.linspace(-6, 6, 200, dtype=torch.float64, requires_grad=True)
    (exact,) = torch.autograd.grad(F.gelu(x).sum(), x)
    torch.testing.assert_close(gelu_slope(x), exact, rtol=0, atol=1e-14)
