"""Every attention backend against the equation written out, in float64 where the kernel has it."""

import math

import pytest
import torch

from megamem.ops.attention.softmax import Past, attention, unmasked_attention

HEADS, WIDTH, BATCH = 4, 8, 2


def naive(query, key, value, past):
    """softmax(q k / sqrt(width)) v, one query at a time, over the keys it may see."""
    groups = query.shape[2] // key.shape[2]
    out = torch.zeros_like(query)
    for b in range(query.shape[1]):
        for h in range(query.shape[2]):
            for t in range(query.shape[0]):
                keys, values = [], []
                for part in past:
                    for j in range(part.key.shape[0]):
                        seen = part.visible
                        if seen is None or bool(seen[b] if seen.ndim == 1 else seen[j, b]):
                            keys.append(part.key[j, b, h // groups])
                            values.append(part.value[j, b, h // groups])
                keys += list(key[: t + 1, b, h // groups])
                values += list(value[: t + 1, b, h // groups])
                scores = torch.stack([query[t, b, h] @ k / math.sqrt(WIDTH) for k in keys])
                out[t, b, h] = scores.softmax(0) @ torch.stack(values)
    return out


def random(tokens, heads, generator):
    return torch.randn(tokens, BATCH, heads, WIDTH, dtype=torch.float64, generator=generator)


def make(tokens, sizes, kv_heads, mask=None):
    g = torch.Generator().manual_seed(tokens + sum(sizes))
    visible = {
        None: lambda n: None,
        "rows": lambda n: torch.tensor([True, False]),
        "keys": lambda n: torch.rand(n, BATCH, generator=g) > 0.5,
    }[mask]
    past = [Past(random(n, kv_heads, g), random(n, kv_heads, g), visible(n)) for n in sizes]
    return random(tokens, HEADS, g), random(tokens, kv_heads, g), random(tokens, kv_heads, g), past


@pytest.mark.parametrize("backend", ["eager", "sdpa", "flex"])
@pytest.mark.parametrize(("tokens", "sizes"), [(5, ()), (7, (3,)), (1, (6,)), (6, (0,)), (4, (3, 5))])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_backends_match_the_equation(backend, tokens, sizes, kv_heads):
    query, key, value, past = make(tokens, sizes, kv_heads)
    out = attention(query, key, value, past, backend)
    # float64 sums of at most 15 terms in another order
    torch.testing.assert_close(out, naive(query, key, value, past), rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("mask", ["rows", "keys"])
def test_masked_pasts(backend, mask):
    query, key, value, past = make(5, (4, 3), 2, mask)
    out = attention(query, key, value, past, backend)
    torch.testing.assert_close(out, naive(query, key, value, past), rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", ["eager", "sdpa", "flex"])
@pytest.mark.parametrize("mask", [None, "rows"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_queries_that_see_everything(backend, mask, kv_heads):
    query, key, value, past = make(5, (4, 3), kv_heads, mask)
    parts = [*past, Past(key, value)]
    none = key[:0]
    expected = naive(query, none, none, parts)
    torch.testing.assert_close(unmasked_attention(query, parts, backend), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("sizes", [(3,), (2, 4)])
@pytest.mark.parametrize(("tokens", "kv_heads"), [(4, 4), (4, 2), (1, 2)])
def test_merged_gradients(tokens, kv_heads, sizes):
    query, key, value, past = make(tokens, sizes, kv_heads)
    leaves = [query, key, value, *(t for p in past for t in (p.key, p.value))]
    for leaf in leaves:
        leaf.requires_grad_()

    def run(*tensors):
        q, k, v, *rest = tensors
        parts = [Past(rest[i], rest[i + 1]) for i in range(0, len(rest), 2)]
        return attention(q, k, v, parts, "sdpa")

    assert torch.autograd.gradcheck(run, leaves)


def test_merged_gradients_equal_eager_in_bfloat16():
    query, key, value, past = make(40, (24,), 4)
    reference = [t.detach().clone().requires_grad_() for t in (query, key, value, past[0].key, past[0].value)]
    half = [t.detach().bfloat16().requires_grad_() for t in reference]
    target = torch.randn_like(query)
    for leaves in (reference, half):
        q, k, v, pk, pv = leaves
        backend = "eager" if leaves is reference else "sdpa"
        (attention(q, k, v, [Past(pk, pv)], backend).double() * target).sum().backward()
    for exact, rough in zip(reference, half, strict=True):
        error = (rough.grad.double() - exact.grad).norm() / exact.grad.norm()
        # bfloat16 has 8 bits: 2^-9 rounding of inputs and outputs, a few roundings deep
        assert error < 2e-2, error
