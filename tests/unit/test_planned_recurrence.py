"""Recurrences of flash-linear-attention as a ledger sees them: shapes, kernels, products and bytes by hand."""

import pytest
import torch

from megamem.ops.linear_recurrence.fla import fla_recurrence
from megamem.planning.fla_kernels import CHUNK, PLANNED
from megamem.planning.ledger import Ledger
from megamem.planning.operations import Kind

ROWS, HEADS, GROUPS, TOKENS, KEYS, VALUES = 2, 3, 2, 2 * CHUNK, 16, 32


def operands(decay, rate):
    given = {
        "query": torch.zeros(ROWS, HEADS, GROUPS, TOKENS, KEYS, dtype=torch.bfloat16),
        "key": torch.zeros(ROWS, HEADS, TOKENS, KEYS, dtype=torch.bfloat16),
        "value": torch.zeros(ROWS, HEADS, TOKENS, VALUES, dtype=torch.bfloat16),
        "state": torch.zeros(ROWS, HEADS, KEYS, VALUES),
    }
    given |= {"log_decay": torch.zeros(ROWS, HEADS, TOKENS)} if decay else {}
    given |= {"rate": torch.zeros(ROWS, HEADS, TOKENS)} if rate else {}
    return {name: x.requires_grad_() for name, x in given.items()}


def kernels(ledger):
    """Those that multiply: their FLOPs and bytes."""
    return [(each.flops, sum(each.moved)) for each in ledger.operations if each.kind == Kind.MATMUL_BF16 and each.flops]


@pytest.mark.parametrize("resets", [(), ((5,), ())])
@pytest.mark.parametrize("rate", [False, True])
@pytest.mark.parametrize("decay", [False, True])
def test_shapes_and_dtypes_are_those_of_the_recurrence(decay, rate, resets):
    given = operands(decay, rate)
    with Ledger():
        read, after = fla_recurrence(**given, resets=resets, kernels=PLANNED)
        torch.autograd.backward([read, after], [torch.zeros_like(read), torch.zeros_like(after)])
    assert (read.shape, after.shape) == ((ROWS, HEADS, GROUPS, TOKENS, VALUES), (ROWS, HEADS, KEYS, VALUES))
    assert read.dtype == after.dtype == torch.float32
    for x in given.values():
        assert x.grad.shape == x.shape
        assert x.grad.dtype == x.dtype


HERE = ROWS * HEADS * GROUPS * TOKENS
Q = K = 2 * HERE * KEYS
V = 2 * HERE * VALUES
"""Bytes of queries, keys and values in BF16, repeated for all query heads."""
STATES = 2 * (HERE // CHUNK) * KEYS * VALUES
"""Bytes of the states before all chunks, in BF16."""
LAST = 4 * ROWS * HEADS * GROUPS * KEYS * VALUES
GATE = 4 * HERE
WITH_STATE = 2 * HERE * KEYS * VALUES
"""FLOPs of a product of all tokens with states."""


def test_a_recurrence_without_gates():
    given = operands(decay=False, rate=False)
    with Ledger() as ledger:
        read, after = fla_recurrence(**given, kernels=PLANNED)
        forward = kernels(ledger)
        ledger.operations = []
        torch.autograd.backward([read, after], [torch.zeros_like(read), torch.zeros_like(after)])
    within = 2 * HERE * CHUNK
    assert forward == [
        (WITH_STATE, K + V + LAST + STATES + LAST),
        (WITH_STATE + within * (KEYS + VALUES), Q + K + V + STATES + V),
    ]
    # the states anew and their gradients, in FP32; then queries and keys, then values
    assert kernels(ledger) == [
        (WITH_STATE, K + V + LAST + 2 * STATES),
        (WITH_STATE, Q + V + LAST + 2 * STATES + LAST),
        (2 * WITH_STATE + within * (3 * KEYS + VALUES), 2 * (Q + K) + V + 2 * STATES + V + 2 * STATES),
        (WITH_STATE + within * (KEYS + VALUES), Q + K + V + 2 * STATES + V),
    ]


def test_a_rate_solves_within_chunks_and_a_decay_saves_a_kernel():
    counts = {}
    for decay in (False, True):
        given = operands(decay, rate=True)
        with Ledger() as ledger:
            read, after = fla_recurrence(**given, kernels=PLANNED)
            counts["forward", decay] = len(kernels(ledger))
            first = kernels(ledger)[0]
            ledger.operations = []
            torch.autograd.backward([read, after], [torch.zeros_like(read), torch.zeros_like(after)])
            counts["backward", decay] = len(kernels(ledger))
        inverse = 2 * HERE * CHUNK
        overlaps, solved = 2 * HERE * CHUNK * KEYS, pytest.approx(2 * HERE * CHUNK * CHUNK / 3)
        if decay:
            assert first[0] - overlaps == solved
            assert first[1] == K + 2 * GATE + inverse
        else:
            assert first == (overlaps, K + GATE + 2 * inverse)  # FP32 in between
    assert counts == {("forward", False): 5, ("forward", True): 4, ("backward", False): 6, ("backward", True): 6}
