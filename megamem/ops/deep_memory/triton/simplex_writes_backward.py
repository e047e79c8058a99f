"""The backward pass of writing a group of Memora's inner chunks in one kernel.

A program goes through all inner chunks of one head of one row, from the last one to the first. Blocks of inner units
pass over the multiprocessor three times for each: for what goes through the first matrix's logarithms, for what goes
through the last one's, and, once the gradient of r is known, for what goes through z and both matrices' weights. With S
for a row's shares W / c and E for S log W,

    log W' = a log W - d^T (f k) - z^T a_after,   z = (a_t - 1) E^T - d ((b k) S^T)        the first matrix
    L' = a L - (f r)^T h                                                                   the last one

where f are rates times the decays after a token. The gradients of the logarithms are changed in place, block by block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megamem.ops.deep_memory.simplex_group_backward import ReadGradients, WriteGradients
from megamem.ops.deep_memory.simplex_group_forward import Tokens
from megamem.ops.deep_memory.triton.blocks import (
    add_product,
    below,
    density,
    error_gradients,
    load_block,
    load_numbers,
    load_units,
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


@triton.jit
def through_simplex_writes_kernel(
    given: Tokens, written: Written, reads: ReadGradients, found: WriteGradients, heads, count, sizes
):  # fmt: skip
    """Fill `found`; reads: what goes back through the reads, of which `change` and `active` are overwritten.

    heads: H; count: N.
    """
    row_head = tl.program_id(0).to(tl.int64)
    tokens, channels = tl.arange(0, sizes.token_block), tl.arange(0, sizes.channel_block)
    inside = (channels < sizes.width)[None, :]
    gain = inside.to(given.key.dtype.element_ty)
    if given.weight is not None:
        gain = load_numbers(given.weight + (row_head % heads) * sizes.width, channels, sizes.width)[None, :]
    of_gain = tl.zeros((sizes.channel_block,), given.key.dtype.element_ty)
    for step in range(count):
        at = row_head * count + (count - 1 - step)
        sums = column_sums(written.down + at * sizes.inner * sizes.width, channels, of_gain, sizes)
        of_fade = through_first(given, written, reads, found, row_head, at, tokens, channels, sizes)
        of_fade, of_back = through_last(
            given, written, reads, found, of_fade, sums, row_head, at, tokens, channels, sizes
        )  # fmt: skip
        wrong = load_tokens(written.wrong, at, tokens, channels, sizes)
        answered = load_tokens(written.answered, at, tokens, channels, sizes)
        key = load_tokens(given.key, at, tokens, channels, sizes)
        value = load_tokens(given.value, at, tokens, channels, sizes)
        of_wrong = load_tokens(reads.wrong, at, tokens, channels, sizes)
        of_answered, of_slope, of_weight = error_gradients(of_wrong, answered, key, value, gain, inside, sizes)
        of_gain += tl.sum(of_weight, 0)
        place = at * sizes.tokens * sizes.width
        store_block(found.value + place, -of_slope, tokens, channels, sizes.tokens, sizes.width)
        # the last softmax's backward: each row's sum of weights times their gradients, over c
        along = tl.sum(wrong * of_back + of_answered * answered, 0) / sizes.last_sum
        of_key = load_tokens(found.key, at, tokens, channels, sizes)
        if sizes.residual:
            of_key += of_slope
        of_key = through_weights(
            given, written, reads, found, of_key, of_answered, along, sums, row_head, at, tokens, channels, sizes
        )  # fmt: skip
        store_block(found.key + place, of_key, tokens, channels, sizes.tokens, sizes.width)
        if found.fade is not None:
            tl.store(found.fade + at * sizes.width + channels, of_fade, mask=channels < sizes.width)
        tl.debug_barrier()
    if found.weight is not None:
        tl.store(found.weight + row_head * sizes.width + channels, of_gain, mask=channels < sizes.width)


@triton.jit
def through_first(given, written, reads, found, row_head, at, tokens, channels, sizes):
    """Go back through the first matrix's logarithms: return the gradient of their decays [D].

    Those of d take the places of what came from the reads; those of keys, rates and decays are written, as far as they
    come this way.
    """
    of_hidden, of_matrix = at * sizes.tokens * sizes.inner, at * sizes.inner * sizes.width
    of_gradient, place = row_head * sizes.inner * sizes.width, at * sizes.tokens * sizes.width
    key = load_tokens(given.key, at, tokens, channels, sizes)
    rate = load_tokens(given.rate, at, tokens, channels, sizes)
    after = load_after(given, rate, at, tokens, channels, sizes)
    of_step, of_rated = tl.zeros_like(key), tl.zeros_like(key)
    of_lost, of_after = tl.zeros_like(key), tl.zeros_like(key)
    of_fade = tl.zeros((sizes.channel_block,), key.dtype)
    for begin in range(0, sizes.inner, sizes.unit_block):
        units = begin + tl.arange(0, sizes.unit_block)
        of_logs = load_units(found.up + of_gradient, units, channels, 0, sizes)
        weights, exact = first_matrix(written.up + of_matrix, units, channels, sizes)
        change = load_block(written.change + of_hidden, tokens, units, sizes.tokens, sizes.inner)
        of_change = load_block(reads.change + of_hidden, tokens, units, sizes.tokens, sizes.inner)
        of_fade += tl.sum(of_logs * exact, 0)
        of_step = add_product(of_step, -change, of_logs, sizes.precision)
        of_change = add_product(of_change, -after * rate * key, tl.trans(of_logs), sizes.precision)
        if sizes.shifting:
            lost = tl.exp(load_tokens(given.log_decay, at, tokens, channels, sizes)) - 1.0
            shares = weights / sizes.first_sum
            along = product(rate * key, tl.trans(shares), sizes.precision)
            shift = product(lost, tl.trans(shares * exact), sizes.precision) - change * along
            of_shift = -product(after, tl.trans(of_logs), sizes.precision)
            of_after = add_product(of_after, -shift, of_logs, sizes.precision)
            of_lost = add_product(of_lost, of_shift, shares * exact, sizes.precision)
            of_change -= of_shift * along
            of_rated = add_product(of_rated, -of_shift * change, shares, sizes.precision)
        store_block(reads.change + of_hidden, of_change, tokens, units, sizes.tokens, sizes.inner)
    of_key = load_tokens(reads.key, at, tokens, channels, sizes) + after * rate * of_step + rate * of_rated
    store_block(found.key + place, of_key, tokens, channels, sizes.tokens, sizes.width)
    of_rate = load_tokens(reads.rate, at, tokens, channels, sizes) + key * (after * of_step + of_rated)
    store_block(found.rate + place, of_rate, tokens, channels, sizes.tokens, sizes.width)
    if found.after is not None:
        store_block(found.after + place, of_after + rate * key * of_step, tokens, channels, sizes.tokens, sizes.width)
        fade = tl.exp(load_tokens(given.log_decay, at, tokens, channels, sizes))
        of_first = load_numbers(reads.decay + at * sizes.width, channels, sizes.width)
        of_decay = of_lost * fade + tl.where((tokens == 0)[:, None], of_first[None, :], 0.0)
        store_block(found.log_decay + place, of_decay, tokens, channels, sizes.tokens, sizes.width)
    # the next passes read these in other threads
    tl.debug_barrier()
    return of_fade


@triton.jit
def through_last(given, written, reads, found, of_fade, sums, row_head, at, tokens, channels, sizes):
    """Go back through the last matrix's logarithms, and through d to r.

    Returns: the gradient of the decays, with what there was of it [D]; that of r through W2^T r [T, D].
    """
    of_hidden, of_matrix = at * sizes.tokens * sizes.inner, at * sizes.inner * sizes.width
    of_gradient, place = row_head * sizes.inner * sizes.width, at * sizes.tokens * sizes.width
    wrong = load_tokens(written.wrong, at, tokens, channels, sizes)
    rate = load_tokens(given.rate, at, tokens, channels, sizes)
    after = load_after(given, rate, at, tokens, channels, sizes)
    of_step, of_wrong = tl.zeros_like(wrong), tl.zeros_like(wrong)
    for begin in range(0, sizes.inner, sizes.unit_block):
        units = begin + tl.arange(0, sizes.unit_block)
        of_logs = load_units(found.down + of_gradient, units, channels, 1, sizes)
        weights, logs = last_matrix(written.down + of_matrix, units, channels, sums, sizes)
        active = load_block(written.active + of_hidden, tokens, units, sizes.tokens, sizes.inner)
        of_active = load_block(reads.active + of_hidden, tokens, units, sizes.tokens, sizes.inner)
        of_fade += tl.sum(of_logs * logs, 0)
        of_step = add_product(of_step, -active, of_logs, sizes.precision)
        of_active = add_product(of_active, -after * rate * wrong, tl.trans(of_logs), sizes.precision)
        store_block(reads.active + of_hidden, of_active, tokens, units, sizes.tokens, sizes.inner)
        hidden = load_block(written.hidden + of_hidden, tokens, units, sizes.tokens, sizes.inner)
        of_change = load_block(reads.change + of_hidden, tokens, units, sizes.tokens, sizes.inner)
        of_back = of_change * (below(hidden) + hidden * density(hidden))
        of_wrong = add_product(of_wrong, of_back, weights, sizes.precision)
    of_all = load_tokens(reads.wrong, at, tokens, channels, sizes) + after * rate * of_step + of_wrong
    store_block(reads.wrong + place, of_all, tokens, channels, sizes.tokens, sizes.width)
    of_rate = load_tokens(found.rate, at, tokens, channels, sizes) + wrong * after * of_step
    store_block(found.rate + place, of_rate, tokens, channels, sizes.tokens, sizes.width)
    if found.after is not None:
        of_after = load_tokens(found.after, at, tokens, channels, sizes) + rate * wrong * of_step
        store_block(found.after + place, of_after, tokens, channels, sizes.tokens, sizes.width)
    tl.debug_barrier()
    return of_fade, of_wrong


@triton.jit
def through_weights(
    given, written, reads, found, of_key, of_answered, along, sums, row_head, at, tokens, channels, sizes
):  # fmt: skip
    """Return the gradient of keys [T, D] through z, and turn those of both logarithms into those as `at` starts.

    along: each last row's sum of weights times their gradients, over c [D].
    """
    of_hidden, of_matrix = at * sizes.tokens * sizes.inner, at * sizes.inner * sizes.width
    of_gradient = row_head * sizes.inner * sizes.width
    rate = load_tokens(given.rate, at, tokens, channels, sizes)
    fade = load_fade(given, rate, at, channels, sizes)[None, :]
    for begin in range(0, sizes.inner, sizes.unit_block):
        units = begin + tl.arange(0, sizes.unit_block)
        hidden = load_block(written.hidden + of_hidden, tokens, units, sizes.tokens, sizes.inner)
        back = load_block(written.back + of_hidden, tokens, units, sizes.tokens, sizes.inner)
        of_change = load_block(reads.change + of_hidden, tokens, units, sizes.tokens, sizes.inner)
        of_active = load_block(reads.active + of_hidden, tokens, units, sizes.tokens, sizes.inner)
        weights, _ = last_matrix(written.down + of_matrix, units, channels, sums, sizes)
        of_active = add_product(of_active, of_answered, tl.trans(weights), sizes.precision)
        slope = below(hidden) + hidden * density(hidden)
        of_z = of_change * back * density(hidden) * (2.0 - hidden * hidden) + of_active * slope
        # the last matrix
        wrong = load_tokens(written.wrong, at, tokens, channels, sizes)
        active = load_block(written.active + of_hidden, tokens, units, sizes.tokens, sizes.inner)
        of_weights = product(tl.trans(of_change * slope), wrong, sizes.precision)
        of_weights = add_product(of_weights, tl.trans(active), of_answered, sizes.precision)
        of_logs = fade * load_units(found.down + of_gradient, units, channels, 1, sizes)
        of_logs += weights * (of_weights - along[None, :])
        of_logs += load_units(reads.down + of_matrix, units, channels, 1, sizes)
        store_units(found.down + of_gradient, of_logs, units, channels, 1, sizes)
        # the first one
        weights, exact = first_matrix(written.up + of_matrix, units, channels, sizes)
        of_key = add_product(of_key, of_z, weights, sizes.precision)
        key = load_tokens(given.key, at, tokens, channels, sizes)
        of_weights = product(tl.trans(of_z), key, sizes.precision)
        of_next = load_units(found.up + of_gradient, units, channels, 0, sizes)
        if sizes.shifting:
            of_logs = through_shifts(
                given, written, of_next, of_weights, weights, exact, fade, at, tokens, channels, units, sizes
            )  # fmt: skip
        else:
            of_logs = of_next + weights * (
                of_weights - tl.sum(weights * of_weights, 1, keep_dims=True) / sizes.first_sum
            )
        of_logs += load_units(reads.up + of_matrix, units, channels, 0, sizes)
        store_units(found.up + of_gradient, of_logs, units, channels, 0, sizes)
    return of_key


@triton.jit
def through_shifts(
    given, written, of_next, of_weights, weights, exact, fade, at, tokens, channels, units, sizes
):  # fmt: skip
    """Return the gradient of a block of the first matrix's L [I, D], whose shares and E the shifts of rows take too.

    of_next: that of L as the next inner chunk starts; of_weights: that of W, as far as it comes through z.
    """
    key = load_tokens(given.key, at, tokens, channels, sizes)
    rate = load_tokens(given.rate, at, tokens, channels, sizes)
    after = load_tokens(given.after, at, tokens, channels, sizes)
    lost = tl.exp(load_tokens(given.log_decay, at, tokens, channels, sizes)) - 1.0
    of_hidden = at * sizes.tokens * sizes.inner
    change = load_block(written.change + of_hidden, tokens, units, sizes.tokens, sizes.inner)
    of_shift = -product(after, tl.trans(of_next), sizes.precision)
    of_entropies = product(tl.trans(of_shift), lost, sizes.precision)
    of_shares = product(tl.trans(-of_shift * change), rate * key, sizes.precision) + exact * of_entropies
    shares = weights / sizes.first_sum
    of_exact = fade * of_next + shares * of_entropies + weights * (of_weights + of_shares / sizes.first_sum)
    return of_exact - shares * tl.sum(of_exact, 1, keep_dims=True)
