"""Writing a group of inner chunks in one kernel: `write` of `group_forward.py` for networks of two matrices.

A program goes through all inner chunks of one head of one row, or of a part of its inner units (`meeting.py`). The
head's weights are too large for a multiprocessor: blocks of inner units pass over it, twice for each inner chunk, once
for what the network answers to the keys, once for the weights as the next inner chunk starts. These are written where
that inner chunk reads them; the device's L2 cache, which holds the weights of all programs at work, hands them back.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from megamem.ops.deep_memory.group_forward import Shares, Written
from megamem.ops.deep_memory.triton.blocks import (
    add_product,
    below,
    density,
    following,
    load_block,
    load_numbers,
    load_units,
    output_error,
    product,
    store_block,
    store_units,
)
from megamem.ops.deep_memory.triton.meeting import Meeting, meet, place, store_terms, sum_of_terms


class Given(NamedTuple):
    """What the kernel reads."""

    key: Tensor
    """[B, H, N, T, D], as `value`."""
    value: Tensor
    weight: Tensor | None
    """That of the norm, [H, D]."""
    shares: Shares
    """See there; only those after the last token are read."""


class Last(NamedTuple):
    """W and S after the last inner chunk; momentum is empty if there is none."""

    weights: tuple[Tensor, ...]
    momentum: tuple[Tensor, ...]


@triton.jit
def write_kernel(given: Given, written: Written, last: Last, meeting: Meeting, heads, first, stop, count, sizes):
    """Fill `written` and `last`; the weights of the first inner chunk are there.

    heads: H; first, stop: the turns of this launch, of N + 1: each finishes an inner chunk and begins the next one;
    count: N.
    """
    row_head, part = place(meeting, sizes)
    tokens, channels = tl.arange(0, sizes.token_block), tl.arange(0, sizes.channel_block)
    inside = (channels < sizes.width)[None, :]
    gain = inside.to(given.key.dtype.element_ty)
    if given.weight is not None:
        gain = load_numbers(given.weight + (row_head % heads) * sizes.width, channels, sizes.width)[None, :]
    for n in range(first, stop):
        if n > 0:
            meet(meeting, row_head, n, sizes)
            answered = sum_of_terms(meeting, row_head, n - 1, tokens, channels, sizes)
            finish(given, written, last, answered, gain, inside, row_head, part, n - 1, count, tokens, channels, sizes)
            # the weights as an inner chunk starts were written by other threads than those that read them
            tl.debug_barrier()
        if n < count:
            answered = answer(given, written, row_head * count + n, part, tokens, channels, sizes)
            store_terms(meeting, answered, row_head, part, n, tokens, channels, sizes)


@triton.jit
def answer(given, written, at, part, tokens, channels, sizes):
    """Return a part's terms of what the last matrix makes of the keys [T, D] of inner chunk `at`; write z and h."""
    key = load_block(given.key + at * sizes.tokens * sizes.width, tokens, channels, sizes.tokens, sizes.width)
    answered = tl.zeros_like(key)
    of_hidden, of_matrix = at * sizes.tokens * sizes.inner, at * sizes.inner * sizes.width
    for begin in range(0, sizes.part_units, sizes.unit_block):
        units = part * sizes.part_units + begin + tl.arange(0, sizes.unit_block)
        up = load_units(written.weights[0] + of_matrix, units, channels, 0, sizes)
        hidden = product(key, tl.trans(up), sizes.precision)
        active = hidden * below(hidden)
        store_block(written.hidden + of_hidden, hidden, tokens, units, sizes.tokens, sizes.inner)
        store_block(written.inputs[1] + of_hidden, active, tokens, units, sizes.tokens, sizes.inner)
        down = load_units(written.weights[1] + of_matrix, units, channels, 1, sizes)
        answered = add_product(answered, active, down, sizes.precision)
    return answered


@triton.jit
def finish(given, written, last, answered, gain, inside, row_head, part, n, count, tokens, channels, sizes):
    """Write r, W1^T r, d and the next weights and momentum, given what inner chunk n's keys are answered [T, D]."""
    at = row_head * count + n
    of_tokens = at * sizes.tokens * sizes.width
    of_hidden, of_matrix = at * sizes.tokens * sizes.inner, at * sizes.inner * sizes.width
    key = load_block(given.key + of_tokens, tokens, channels, sizes.tokens, sizes.width)
    value = load_block(given.value + of_tokens, tokens, channels, sizes.tokens, sizes.width)
    wrong = output_error(answered, key, value, gain, inside, sizes)
    if part == 0:
        store_block(written.answered + of_tokens, answered, tokens, channels, sizes.tokens, sizes.width)
        store_block(written.changes[1] + of_tokens, wrong, tokens, channels, sizes.tokens, sizes.width)
    for begin in range(0, sizes.part_units, sizes.unit_block):
        units = part * sizes.part_units + begin + tl.arange(0, sizes.unit_block)
        down = load_units(written.weights[1] + of_matrix, units, channels, 1, sizes)
        hidden = load_block(written.hidden + of_hidden, tokens, units, sizes.tokens, sizes.inner)
        back = product(wrong, tl.trans(down), sizes.precision)
        slope = back * (below(hidden) + hidden * density(hidden))
        store_block(written.back + of_hidden, back, tokens, units, sizes.tokens, sizes.inner)
        store_block(written.changes[0] + of_hidden, slope, tokens, units, sizes.tokens, sizes.inner)
        up = load_units(written.weights[0] + of_matrix, units, channels, 0, sizes)
        change_units(0, up, slope, key, given, written, last, row_head, n, count, tokens, channels, units, sizes)
        active = load_block(written.inputs[1] + of_hidden, tokens, units, sizes.tokens, sizes.inner)
        change_units(1, down, active, wrong, given, written, last, row_head, n, count, tokens, channels, units, sizes)


@triton.jit
def change_units(
    matrix: tl.constexpr, weights, wide, narrow, given, written, last, row_head, n, count, tokens, channels, units,
    sizes,
):  # fmt: skip
    """Write a block of W and S [I, D] as the inner chunk after n starts.

    weights: the block of W as n starts; wide [T, I], narrow [T, D]: the factors of the tokens' gradients.
    """
    at, shares = row_head * count + n, given.shares
    step = load_numbers(shares.step + at * sizes.tokens, tokens, sizes.tokens)[:, None]
    if shares.lost is not None:
        weights += tl.load(shares.lost + at) * weights
    if shares.momentum is not None:
        momentum = load_units(
            written.momentum[matrix] + at * sizes.inner * sizes.width, units, channels, matrix, sizes
        )  # fmt: skip
        weights += tl.load(shares.last_carried + at) * momentum
        momentum_step = load_numbers(shares.momentum_step + at * sizes.tokens, tokens, sizes.tokens)[:, None]
        momentum = add_product(
            tl.load(shares.momentum + at) * momentum, tl.trans(wide), -momentum_step * narrow, sizes.precision
        )
        to = following(written.momentum[matrix], last.momentum[matrix], row_head, n, count, sizes)
        store_units(to, momentum, units, channels, matrix, sizes)
    weights = add_product(weights, tl.trans(wide), -step * narrow, sizes.precision)
    to = following(written.weights[matrix], last.weights[matrix], row_head, n, count, sizes)
    store_units(to, weights, units, channels, matrix, sizes)
