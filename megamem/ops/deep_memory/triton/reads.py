"""Reading a group of inner chunks in one kernel, and going back through it in another: `read` and `through_reads`.

A program answers the queries of one head in one inner chunk. What they make in the network, several times as wide as
the head, never leaves the multiprocessor: blocks of inner units pass over it, once. With z = q U^T, h = GELU(z), the
tokens' keys k and h_i, their changes d_i and r_i, and shares b, m and R of the first weights, momentum and tokens:

    z_t = b_t q_t U^T + m_t q_t S_U^T - sum_i R[t, i] (k_i . q_t) d_i
    y_t = b_t h_t V^T + m_t h_t S_V^T - sum_i R[t, i] (h_i . h_t) r_i

The sums over tokens of y need all inner units of h_i . h_t: they come after the last block.
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
    load_block,
    load_numbers,
    load_units,
    product,
    store_block,
)


class Given(NamedTuple):
    """What the kernels read."""

    query: Tensor
    """[B, H, N, Q, D]"""
    shares: Shares
    """See there; only those of queries are read."""
    written: Written


class Found(NamedTuple):
    """What the backward kernel writes. Letters of shapes as in `group_forward.py`; G: heads that read one memory."""

    query: Tensor
    """Gradient of the queries through the network, [B, H, N, Q, D]."""
    rated: Tensor
    """[B, H, N, Q, T]"""
    first: Tensor | None
    """[B, H, N, Q, 1], as `carried`."""
    carried: Tensor | None
    hidden: Tensor
    """Gradient of z, [B, H, N, Q, I]."""
    active: Tensor
    """h of the queries, [B, H, N, Q, I]."""
    key: Tensor
    """[B, H, N, G, T, D], by each head that reads, as the following."""
    change: Tensor
    """[B, H, N, G, T, I], of d."""
    inputs: Tensor
    """[B, H, N, G, T, I], of the tokens' h."""
    wrong: Tensor
    """[B, H, N, G, T, D], of r."""


@triton.jit
def read_kernel(given: Given, answered, sizes):
    """Write what the last matrix makes of the queries, before the norm, to `answered` [B, H, N, Q, D]."""
    place = tl.program_id(0).to(tl.int64)
    at, tokens, channels = (
        place // sizes.query_heads,
        tl.arange(0, sizes.token_block),
        tl.arange(0, sizes.channel_block),
    )
    written, shares = given.written, given.shares
    of_queries, of_tokens = place * sizes.tokens * sizes.width, at * sizes.tokens * sizes.width
    of_hidden, of_matrix = at * sizes.tokens * sizes.inner, at * sizes.inner * sizes.width
    query = load_block(given.query + of_queries, tokens, channels, sizes.tokens, sizes.width)
    key = load_block(written.inputs[0] + of_tokens, tokens, channels, sizes.tokens, sizes.width)
    rated = load_block(shares.rated + place * sizes.tokens * sizes.tokens, tokens, tokens, sizes.tokens, sizes.tokens)
    first, carried = load_share(shares.first, query, place, tokens, sizes), query
    if shares.carried is not None:
        carried = load_share(shares.carried, query, place, tokens, sizes)
    scores = rated * product(query, tl.trans(key), sizes.precision)
    across, by_weights, by_momentum = tl.zeros_like(rated), tl.zeros_like(query), tl.zeros_like(query)
    for begin in range(0, sizes.inner, sizes.unit_block):
        units = begin + tl.arange(0, sizes.unit_block)
        up = load_units(written.weights[0] + of_matrix, units, channels, 0, sizes)
        hidden = first * product(query, tl.trans(up), sizes.precision)
        if shares.carried is not None:
            up_momentum = load_units(written.momentum[0] + of_matrix, units, channels, 0, sizes)
            hidden += carried * product(query, tl.trans(up_momentum), sizes.precision)
        change = load_block(written.changes[0] + of_hidden, tokens, units, sizes.tokens, sizes.inner)
        hidden -= product(scores, change, sizes.precision)
        active = hidden * below(hidden)
        inputs = load_block(written.inputs[1] + of_hidden, tokens, units, sizes.tokens, sizes.inner)
        across = add_product(across, active, tl.trans(inputs), sizes.precision)
        down = load_units(written.weights[1] + of_matrix, units, channels, 1, sizes)
        by_weights = add_product(by_weights, active, down, sizes.precision)
        if shares.carried is not None:
            down_momentum = load_units(written.momentum[1] + of_matrix, units, channels, 1, sizes)
            by_momentum = add_product(by_momentum, active, down_momentum, sizes.precision)
    wrong = load_block(written.changes[1] + of_tokens, tokens, channels, sizes.tokens, sizes.width)
    found = first * by_weights
    if shares.carried is not None:
        found += carried * by_momentum
    found -= product(rated * across, wrong, sizes.precision)
    store_block(answered + of_queries, found, tokens, channels, sizes.tokens, sizes.width)


@triton.jit
def through_reads_kernel(given: Given, of_answered, found: Found, sizes):
    """Fill `found`, given the gradient of what the last matrix makes, [B, H, N, Q, D]."""
    place = tl.program_id(0).to(tl.int64)
    at, tokens, channels = (
        place // sizes.query_heads,
        tl.arange(0, sizes.token_block),
        tl.arange(0, sizes.channel_block),
    )
    written, shares = given.written, given.shares
    of_queries, of_tokens = place * sizes.tokens * sizes.width, at * sizes.tokens * sizes.width
    of_rated = place * sizes.tokens * sizes.tokens
    query = load_block(given.query + of_queries, tokens, channels, sizes.tokens, sizes.width)
    key = load_block(written.inputs[0] + of_tokens, tokens, channels, sizes.tokens, sizes.width)
    wrong = load_block(written.changes[1] + of_tokens, tokens, channels, sizes.tokens, sizes.width)
    of_out = load_block(of_answered + of_queries, tokens, channels, sizes.tokens, sizes.width)
    rated = load_block(shares.rated + of_rated, tokens, tokens, sizes.tokens, sizes.tokens)
    scores = product(query, tl.trans(key), sizes.precision)
    # R[t, i] (h_i . h_t) r_i: the gradient goes to r_i, to R, and to h_i . h_t
    of_rated_across = -product(of_out, tl.trans(wrong), sizes.precision)
    across, of_rated_scores, of_query = tl.zeros_like(rated), tl.zeros_like(rated), tl.zeros_like(query)
    of_first, of_carried = tl.zeros((sizes.token_block,), query.dtype), tl.zeros((sizes.token_block,), query.dtype)
    for begin in range(0, sizes.inner, sizes.unit_block):
        units = begin + tl.arange(0, sizes.unit_block)
        across, of_rated_scores, of_query, of_first, of_carried = through_units(
            given, found, query, rated, scores, of_out, of_rated_across, across, of_rated_scores, of_query, of_first,
            of_carried, place, tokens, channels, units, sizes,
        )  # fmt: skip
    store_block(
        found.rated + of_rated,
        of_rated_scores * scores + of_rated_across * across,
        tokens,
        tokens,
        sizes.tokens,
        sizes.tokens,
    )
    # loaded anew: on the chip all the time, these would leave no room for blocks of inner units
    query = load_block(given.query + of_queries, tokens, channels, sizes.tokens, sizes.width)
    key = load_block(written.inputs[0] + of_tokens, tokens, channels, sizes.tokens, sizes.width)
    of_out = load_block(of_answered + of_queries, tokens, channels, sizes.tokens, sizes.width)
    of_scores = rated * of_rated_scores
    of_query = add_product(of_query, of_scores, key, sizes.precision)
    store_block(found.query + of_queries, of_query, tokens, channels, sizes.tokens, sizes.width)
    of_key = product(tl.trans(of_scores), query, sizes.precision)
    store_block(found.key + of_queries, of_key, tokens, channels, sizes.tokens, sizes.width)
    of_wrong = -product(tl.trans(rated * across), of_out, sizes.precision)
    store_block(found.wrong + of_queries, of_wrong, tokens, channels, sizes.tokens, sizes.width)
    if shares.first is not None:
        tl.store(found.first + place * sizes.tokens + tokens, of_first, mask=tokens < sizes.tokens)
    if shares.carried is not None:
        tl.store(found.carried + place * sizes.tokens + tokens, of_carried, mask=tokens < sizes.tokens)


@triton.jit
def through_units(
    given, found, query, rated, scores, of_out, of_rated_across, across, of_rated_scores, of_query, of_first,
    of_carried, place, tokens, channels, units, sizes,
):  # fmt: skip
    """Go back through a block of inner units: write what is as wide as they are, and return the sums over units.

    query, of_out, of_query: [T, D]; rated, scores, across and gradients of shares times scores: [T, T].
    """
    written, shares, at = given.written, given.shares, place // sizes.query_heads
    of_hidden, of_matrix = at * sizes.tokens * sizes.inner, at * sizes.inner * sizes.width
    of_wide = place * sizes.tokens * sizes.inner
    first = load_share(shares.first, query, place, tokens, sizes)
    # forward anew
    up = load_units(written.weights[0] + of_matrix, units, channels, 0, sizes)
    by_up = product(query, tl.trans(up), sizes.precision)
    hidden = first * by_up
    if shares.carried is not None:
        carried = load_share(shares.carried, query, place, tokens, sizes)
        up_momentum = load_units(written.momentum[0] + of_matrix, units, channels, 0, sizes)
        by_up_momentum = product(query, tl.trans(up_momentum), sizes.precision)
        hidden += carried * by_up_momentum
    change = load_block(written.changes[0] + of_hidden, tokens, units, sizes.tokens, sizes.inner)
    hidden -= product(rated * scores, change, sizes.precision)
    probability = below(hidden)
    active = hidden * probability
    inputs = load_block(written.inputs[1] + of_hidden, tokens, units, sizes.tokens, sizes.inner)
    across = add_product(across, active, tl.trans(inputs), sizes.precision)
    store_block(found.active + of_wide, active, tokens, units, sizes.tokens, sizes.inner)
    # back through the last matrix to h
    of_across = rated * of_rated_across
    down = load_units(written.weights[1] + of_matrix, units, channels, 1, sizes)
    by_down = product(of_out, tl.trans(down), sizes.precision)
    of_first += tl.sum(active * by_down, 1)
    of_active = first * by_down + product(of_across, inputs, sizes.precision)
    if shares.carried is not None:
        down_momentum = load_units(written.momentum[1] + of_matrix, units, channels, 1, sizes)
        by_down_momentum = product(of_out, tl.trans(down_momentum), sizes.precision)
        of_carried += tl.sum(active * by_down_momentum, 1)
        of_active += carried * by_down_momentum
    of_inputs = product(tl.trans(of_across), active, sizes.precision)
    store_block(found.inputs + of_wide, of_inputs, tokens, units, sizes.tokens, sizes.inner)
    # through GELU to z, and through the first matrix
    of_z = of_active * (probability + hidden * density(hidden))
    store_block(found.hidden + of_wide, of_z, tokens, units, sizes.tokens, sizes.inner)
    of_first += tl.sum(of_z * by_up, 1)
    of_query = add_product(of_query, first * of_z, up, sizes.precision)
    if shares.carried is not None:
        of_carried += tl.sum(of_z * by_up_momentum, 1)
        of_query = add_product(of_query, carried * of_z, up_momentum, sizes.precision)
    of_rated_scores -= product(of_z, tl.trans(change), sizes.precision)
    of_change = -product(tl.trans(rated * scores), of_z, sizes.precision)
    store_block(found.change + of_wide, of_change, tokens, units, sizes.tokens, sizes.inner)
    return across, of_rated_scores, of_query, of_first, of_carried


@triton.jit
def load_share(pointer, like, place, tokens, sizes):
    """Return a share of each query [T, 1], ones where there is none; like: a block of the same dtype."""
    if pointer is None:
        return tl.full((sizes.token_block, 1), 1.0, like.dtype)
    else:
        return load_numbers(pointer + place * sizes.tokens, tokens, sizes.tokens)[:, None]
