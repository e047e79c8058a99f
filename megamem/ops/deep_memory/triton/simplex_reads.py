"""Reading a group of Memora's inner chunks in one kernel, and going back through it in another.

A program answers the queries of one head in one inner chunk: by the weights after its first token, which are exact, and
by the steps of the tokens after it. Letters of shapes as in `blocks.py`.
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
    load_block,
    load_numbers,
    product,
    store_block,
    store_units,
)
from megamem.ops.deep_memory.triton.simplex_blocks import (
    Written,
    add_column,
    column_logarithm,
    column_softmax,
    first_matrix,
    first_token,
    inside_block,
    load_tokens,
    moved_last,
    row_softmax,
)


class Answers(NamedTuple):
    """What queries are answered, [B, H, N, T, D]."""

    answered: Tensor
    """What the last matrix makes, before the norm."""
    by_weights: Tensor
    """The part of it that the weights after the first token make."""
    sums: Tensor
    """log(sum exp L / c) of the last matrix's rows after the first token, [B, H, N, D]."""


@triton.jit
def read_simplex_kernel(given: Tokens, query, written: Written, answers: Answers, sizes):
    """Fill `answers` for queries [B, H, N, T, D]."""
    at = tl.program_id(0).to(tl.int64)
    tokens, channels = tl.arange(0, sizes.token_block), tl.arange(0, sizes.channel_block)
    of_hidden, of_matrix = at * sizes.tokens * sizes.inner, at * sizes.inner * sizes.width
    asked = load_tokens(query, at, tokens, channels, sizes)
    fade, key_step, wrong_step = first_token(given, written.wrong, asked, at, channels, sizes)
    top = tl.full((sizes.channel_block,), -1e30, asked.dtype)
    total = tl.zeros((sizes.channel_block,), asked.dtype)
    for begin in range(0, sizes.inner, sizes.unit_block):
        units = begin + tl.arange(0, sizes.unit_block)
        logs, _ = moved_last(
            written.down + of_matrix, written.active + of_hidden, units, channels, fade, wrong_step, sizes
        )  # fmt: skip
        top, total = add_column(top, total, logs, inside_block(units, channels, sizes))
    sums = column_logarithm(top, total, sizes)
    tl.store(answers.sums + at * sizes.width + channels, sums, mask=channels < sizes.width)
    key = load_tokens(given.key, at, tokens, channels, sizes)
    later = load_tokens(given.rate, at, tokens, channels, sizes) * (tokens > 0)[:, None]
    causal = tokens[:, None] >= tokens[None, :]
    scores = tl.where(causal, product(asked, tl.trans(later * key), sizes.precision), 0.0)
    across, by_weights = tl.zeros_like(scores), tl.zeros_like(asked)
    for begin in range(0, sizes.inner, sizes.unit_block):
        units = begin + tl.arange(0, sizes.unit_block)
        up, _, _, _ = moved_first(written, of_matrix, of_hidden, units, channels, fade, key_step, sizes)
        change = load_block(written.change + of_hidden, tokens, units, sizes.tokens, sizes.inner)
        hidden = product(asked, tl.trans(up), sizes.precision) - product(scores, change, sizes.precision)
        active = hidden * below(hidden)
        inputs = load_block(written.active + of_hidden, tokens, units, sizes.tokens, sizes.inner)
        across = add_product(across, active, tl.trans(inputs), sizes.precision)
        logs, _ = moved_last(
            written.down + of_matrix, written.active + of_hidden, units, channels, fade, wrong_step, sizes
        )  # fmt: skip
        down = column_softmax(logs, sums, units, channels, sizes)
        by_weights = add_product(by_weights, active, down, sizes.precision)
    wrong = load_tokens(written.wrong, at, tokens, channels, sizes)
    answered = by_weights - product(tl.where(causal, across, 0.0), later * wrong, sizes.precision)
    of_tokens = at * sizes.tokens * sizes.width
    store_block(answers.by_weights + of_tokens, by_weights, tokens, channels, sizes.tokens, sizes.width)
    store_block(answers.answered + of_tokens, answered, tokens, channels, sizes.tokens, sizes.width)


@triton.jit
def moved_first(written, of_matrix, of_hidden, units, channels, fade, step, sizes):
    """Return a block of the first matrix's weights after the first token [I, D], then W0, log W0 and d [I] of it."""
    start, exact = first_matrix(written.up + of_matrix, units, channels, sizes)
    own = load_numbers(written.change + of_hidden, units, sizes.inner)
    logs = fade[None, :] * exact - own[:, None] * step[None, :]
    weights, _ = row_softmax(logs, inside_block(units, channels, sizes), sizes)
    return weights, start, exact, own


@triton.jit
def through_simplex_reads_kernel(given: Tokens, query, written: Written, answers: Answers, of_answered, found, sizes):
    """Fill `found`, given the gradient of what the last matrix makes, [B, H, N, T, D]."""
    at = tl.program_id(0).to(tl.int64)
    tokens, channels = tl.arange(0, sizes.token_block), tl.arange(0, sizes.channel_block)
    asked = load_tokens(query, at, tokens, channels, sizes)
    key = load_tokens(given.key, at, tokens, channels, sizes)
    wrong = load_tokens(written.wrong, at, tokens, channels, sizes)
    rate = load_tokens(given.rate, at, tokens, channels, sizes)
    of_out = load_tokens(of_answered, at, tokens, channels, sizes)
    later, causal = rate * (tokens > 0)[:, None], tokens[:, None] >= tokens[None, :]
    scores = tl.where(causal, product(asked, tl.trans(later * key), sizes.precision), 0.0)
    of_across = tl.where(causal, -product(of_out, tl.trans(later * wrong), sizes.precision), 0.0)
    # the last softmax's backward: each row's sum of weights times their gradients, over c
    by_weights = load_tokens(answers.by_weights, at, tokens, channels, sizes)
    along = tl.sum(of_out * by_weights, 0) / sizes.last_sum
    across, of_scores, of_query = tl.zeros_like(scores), tl.zeros_like(scores), tl.zeros_like(asked)
    of_first = tl.zeros_like(along), tl.zeros_like(along), tl.zeros_like(along)
    for begin in range(0, sizes.inner, sizes.unit_block):
        units = begin + tl.arange(0, sizes.unit_block)
        across, of_scores, of_query, of_first = through_units(
            given, written, answers, found, asked, scores, of_out, of_across, along, across, of_scores, of_query,
            of_first, at, tokens, channels, units, sizes,
        )  # fmt: skip
    of_fade, of_key_step, of_wrong_step = of_first
    # loaded anew: on the chip all the time, these would leave no room for blocks of inner units
    asked = load_tokens(query, at, tokens, channels, sizes)
    key = load_tokens(given.key, at, tokens, channels, sizes)
    wrong = load_tokens(written.wrong, at, tokens, channels, sizes)
    rate = load_tokens(given.rate, at, tokens, channels, sizes)
    of_out = load_tokens(of_answered, at, tokens, channels, sizes)
    later, is_first = rate * (tokens > 0)[:, None], (tokens == 0)[:, None]
    of_scores = tl.where(causal, of_scores, 0.0)
    of_query = add_product(of_query, of_scores, later * key, sizes.precision)
    of_key = product(tl.trans(of_scores), asked, sizes.precision)
    of_wrong = -product(tl.trans(tl.where(causal, across, 0.0)), of_out, sizes.precision)
    # the first token's step is another one
    of_key = tl.where(is_first, of_key_step[None, :], of_key)
    of_wrong = tl.where(is_first, of_wrong_step[None, :], of_wrong)
    of_tokens = at * sizes.tokens * sizes.width
    store_block(found.query + of_tokens, of_query, tokens, channels, sizes.tokens, sizes.width)
    store_block(found.key + of_tokens, rate * of_key, tokens, channels, sizes.tokens, sizes.width)
    store_block(found.wrong + of_tokens, rate * of_wrong, tokens, channels, sizes.tokens, sizes.width)
    of_rate = of_key * key + of_wrong * wrong
    store_block(found.rate + of_tokens, of_rate, tokens, channels, sizes.tokens, sizes.width)
    if found.decay is not None:
        fade, _, _ = first_token(given, written.wrong, asked, at, channels, sizes)
        tl.store(found.decay + at * sizes.width + channels, fade * of_fade, mask=channels < sizes.width)


@triton.jit
def through_units(
    given, written, answers, found, asked, scores, of_out, of_across, along, across, of_scores, of_query, of_first, at,
    tokens, channels, units, sizes,
):  # fmt: skip
    """Go back through a block of inner units: write what is as wide as they are, and return the sums over units.

    of_first: gradients of the first token's decays, and of its rates times key and r, [D] each.
    """
    of_hidden, of_matrix = at * sizes.tokens * sizes.inner, at * sizes.inner * sizes.width
    of_fade, of_key_step, of_wrong_step = of_first
    fade, key_step, wrong_step = first_token(given, written.wrong, asked, at, channels, sizes)
    is_first = (tokens == 0)[:, None]
    # forward anew
    up, start, exact, own_change = moved_first(written, of_matrix, of_hidden, units, channels, fade, key_step, sizes)
    change = load_block(written.change + of_hidden, tokens, units, sizes.tokens, sizes.inner)
    hidden = product(asked, tl.trans(up), sizes.precision) - product(scores, change, sizes.precision)
    probability = below(hidden)
    active = hidden * probability
    inputs = load_block(written.active + of_hidden, tokens, units, sizes.tokens, sizes.inner)
    across = add_product(across, active, tl.trans(inputs), sizes.precision)
    sums = load_numbers(answers.sums + at * sizes.width, channels, sizes.width)
    logs, down_logs = moved_last(
        written.down + of_matrix, written.active + of_hidden, units, channels, fade, wrong_step, sizes
    )  # fmt: skip
    down = column_softmax(logs, sums, units, channels, sizes)
    # back through the last matrix, its softmax and the first token's step
    of_active = product(of_out, tl.trans(down), sizes.precision) + product(of_across, inputs, sizes.precision)
    of_logs = down * (product(tl.trans(active), of_out, sizes.precision) - along[None, :])
    own_active = load_numbers(written.active + of_hidden, units, sizes.inner)
    of_fade += tl.sum(of_logs * down_logs, 0)
    of_wrong_step -= tl.sum(of_logs * own_active[:, None], 0)
    of_inputs = product(tl.trans(of_across), active, sizes.precision)
    of_inputs -= tl.where(is_first, tl.sum(of_logs * wrong_step[None, :], 1)[None, :], 0.0)
    store_block(found.active + of_hidden, of_inputs, tokens, units, sizes.tokens, sizes.inner)
    store_units(found.down + of_matrix, fade[None, :] * of_logs, units, channels, 1, sizes)
    # through GELU to z, and through the first matrix
    of_z = of_active * (probability + hidden * density(hidden))
    of_query = add_product(of_query, of_z, up, sizes.precision)
    of_scores -= product(of_z, tl.trans(change), sizes.precision)
    of_up = product(tl.trans(of_z), asked, sizes.precision)
    of_logs = up * (of_up - tl.sum(up * of_up, 1, keep_dims=True) / sizes.first_sum)
    of_fade += tl.sum(of_logs * exact, 0)
    of_key_step -= tl.sum(of_logs * own_change[:, None], 0)
    of_change = -product(tl.trans(scores), of_z, sizes.precision)
    of_change -= tl.where(is_first, tl.sum(of_logs * key_step[None, :], 1)[None, :], 0.0)
    store_block(found.change + of_hidden, of_change, tokens, units, sizes.tokens, sizes.inner)
    of_exact = fade[None, :] * of_logs
    if sizes.shifting:
        of_exact -= start / sizes.first_sum * tl.sum(of_exact, 1, keep_dims=True)
    store_units(found.up + of_matrix, of_exact, units, channels, 0, sizes)
    return across, of_scores, of_query, (of_fade, of_key_step, of_wrong_step)
