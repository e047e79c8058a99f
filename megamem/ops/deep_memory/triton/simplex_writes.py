"""Writing a group of Memora's inner chunks in one kernel: logarithms of weights, one inner chunk after the other.

A program goes through all inner chunks of one head of one row. Blocks of inner units pass over the multiprocessor three
times for each: for the sums of the last matrix's rows, for what the network answers to the keys, and for the
logarithms as the next inner chunk starts.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from megamem.ops.deep_memory.simplex_group_forward import Tokens
from megamem.ops.deep_memory.triton.blocks import (
    add_product,
    below,
    density,
    following,
    load_block,
    load_numbers,
    output_error,
    product,
    store_block,
    store_units,
)
from megamem.ops.deep_memory.triton.simplex_blocks import (
    Written,
    column_sums,
    first_matrix,
    last_matrix,
    load_after,
    load_fade,
    load_tokens,
)


class Last(NamedTuple):
    """L after the last inner chunk."""

    up: Tensor
    """[B, H, I, D]"""
    down: Tensor
    """[B, H, D, I]"""


@triton.jit
def write_simplex_kernel(given: Tokens, written: Written, last: Last, heads, count, sizes):
    """Fill `written` and `last`; the logarithms of the first inner chunk are there. heads: H; count: N."""
    row_head = tl.program_id(0).to(tl.int64)
    tokens, channels = tl.arange(0, sizes.token_block), tl.arange(0, sizes.channel_block)
    inside = (channels < sizes.width)[None, :]
    gain = inside.to(given.key.dtype.element_ty)
    if given.weight is not None:
        gain = load_numbers(given.weight + (row_head % heads) * sizes.width, channels, sizes.width)[None, :]
    for n in range(count):
        at = row_head * count + n
        key = load_tokens(given.key, at, tokens, channels, sizes)
        sums = column_sums(written.down + at * sizes.inner * sizes.width, channels, key, sizes)
        answered = answer(written, key, sums, at, tokens, channels, sizes)
        of_tokens = at * sizes.tokens * sizes.width
        store_block(written.answered + of_tokens, answered, tokens, channels, sizes.tokens, sizes.width)
        value = load_tokens(given.value, at, tokens, channels, sizes)
        wrong = output_error(answered, key, value, gain, inside, sizes)
        store_block(written.wrong + of_tokens, wrong, tokens, channels, sizes.tokens, sizes.width)
        # the blocks of the hidden layer were written by other threads than those that read them
        tl.debug_barrier()
        change(given, written, last, key, wrong, sums, row_head, n, count, tokens, channels, sizes)
        tl.debug_barrier()


@triton.jit
def answer(written, key, sums, at, tokens, channels, sizes):
    """Return what the last matrix makes of the keys [T, D] of inner chunk `at`, and write z and h."""
    answered = tl.zeros_like(key)
    of_hidden, of_matrix = at * sizes.tokens * sizes.inner, at * sizes.inner * sizes.width
    for begin in range(0, sizes.inner, sizes.unit_block):
        units = begin + tl.arange(0, sizes.unit_block)
        up, _ = first_matrix(written.up + of_matrix, units, channels, sizes)
        hidden = product(key, tl.trans(up), sizes.precision)
        active = hidden * below(hidden)
        store_block(written.hidden + of_hidden, hidden, tokens, units, sizes.tokens, sizes.inner)
        store_block(written.active + of_hidden, active, tokens, units, sizes.tokens, sizes.inner)
        down, _ = last_matrix(written.down + of_matrix, units, channels, sums, sizes)
        answered = add_product(answered, active, down, sizes.precision)
    return answered


@triton.jit
def change(given, written, last, key, wrong, sums, row_head, n, count, tokens, channels, sizes):
    """Write W2^T r, d and the next logarithms, given the errors r [T, D] of inner chunk n."""
    at = row_head * count + n
    of_hidden, of_matrix = at * sizes.tokens * sizes.inner, at * sizes.inner * sizes.width
    rate = load_tokens(given.rate, at, tokens, channels, sizes)
    after = load_after(given, rate, at, tokens, channels, sizes)
    fade = load_fade(given, rate, at, channels, sizes)[None, :]
    to_up = following(written.up, last.up, row_head, n, count, sizes)
    to_down = following(written.down, last.down, row_head, n, count, sizes)
    for begin in range(0, sizes.inner, sizes.unit_block):
        units = begin + tl.arange(0, sizes.unit_block)
        down, down_logs = last_matrix(written.down + of_matrix, units, channels, sums, sizes)
        hidden = load_block(written.hidden + of_hidden, tokens, units, sizes.tokens, sizes.inner)
        back = product(wrong, tl.trans(down), sizes.precision)
        slope = back * (below(hidden) + hidden * density(hidden))
        store_block(written.back + of_hidden, back, tokens, units, sizes.tokens, sizes.inner)
        store_block(written.change + of_hidden, slope, tokens, units, sizes.tokens, sizes.inner)
        up, up_logs = first_matrix(written.up + of_matrix, units, channels, sizes)
        new_up = add_product(fade * up_logs, tl.trans(slope), -after * rate * key, sizes.precision)
        if sizes.shifting:
            decay = load_tokens(given.log_decay, at, tokens, channels, sizes)
            shift = row_shifts(up, up_logs, tl.exp(decay) - 1.0, slope, rate * key, sizes)
            new_up = add_product(new_up, tl.trans(shift), -after, sizes.precision)
        store_units(to_up, new_up, units, channels, 0, sizes)
        active = load_block(written.active + of_hidden, tokens, units, sizes.tokens, sizes.inner)
        new_down = add_product(fade * down_logs, tl.trans(active), -after * rate * wrong, sizes.precision)
        store_units(to_down, new_down, units, channels, 1, sizes)


@triton.jit
def row_shifts(weights, exact, lost, slope, rated, sizes):
    """Return z_t [T, I]: what tokens add to the logarithms of the rows' sums, to first order.

    weights, exact: W0 and its logarithm [I, D]; lost: a - 1 [T, D]; slope: d [T, I]; rated: keys times rates [T, D].
    """
    shares = weights / sizes.first_sum
    by_decay = product(lost, tl.trans(shares * exact), sizes.precision)
    return by_decay - slope * product(rated, tl.trans(shares), sizes.precision)
