"""The backward pass of writing a group of inner chunks in one kernel: `Backward.through_writes` of `group_backward.py`.

A program goes through all inner chunks of one head of one row, or of a part of its inner units (`meeting.py`), from
the last one to the first. Blocks of inner units pass over the multiprocessor twice for each: once for what goes through
the steps

    W' = W + c W + m S - sum_t f_t change_t inputs_t^T,   S' = e S - sum_t p_t change_t inputs_t^T

and once for what goes through r, h, d and z. The gradients of W and S are changed in place, block by block.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from megamem.ops.deep_memory.group_backward import Reads
from megamem.ops.deep_memory.group_forward import Shares, Written
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
from megamem.ops.deep_memory.triton.meeting import Meeting, meet, place, store_terms, sum_of_terms


class Given(NamedTuple):
    """What the kernel reads."""

    value: Tensor
    """[B, H, N, T, D]"""
    weight: Tensor | None
    """That of the norm, [H, D]."""
    shares: Shares
    """See there; only those after the last token are read."""
    written: Written
    reads: tuple[Reads, Reads]
    """The wider of change and inputs is overwritten."""


class Found(NamedTuple):
    """What the kernel writes."""

    weights: tuple[Tensor, ...]
    """Gradients of W after the group, [B, H, out, in], which become those of W as it starts; so with the momentum."""
    momentum: tuple[Tensor, ...]
    value: Tensor
    """[B, H, N, T, D]"""
    weight: Tensor | None
    """That of the norm by inner chunks, [B, H, N, D]."""
    key: Tensor
    """The terms of each part of a head's inner units, [parts, B, H, N, T, D]."""
    step: Tensor
    """So of f, [parts, B, H, N, T, 1]; the following are like the shares they are gradients of, by parts too."""
    lost: Tensor | None
    last_carried: Tensor | None
    momentum_step: Tensor | None
    kept: Tensor | None
    """That of e."""


@triton.jit
def through_writes_kernel(given: Given, found: Found, meeting: Meeting, heads, first, stop, count, sizes):
    """Fill `found`.

    heads: H; first, stop: the turns of this launch, of N + 1: each finishes an inner chunk and begins the one before
    it; count: N.
    """
    row_head, part = place(meeting, sizes)
    tokens, channels = tl.arange(0, sizes.token_block), tl.arange(0, sizes.channel_block)
    inside = (channels < sizes.width)[None, :]
    gain = inside.to(given.value.dtype.element_ty)
    if given.weight is not None:
        gain = load_numbers(given.weight + (row_head % heads) * sizes.width, channels, sizes.width)[None, :]
    # where a part's terms begin, in inner chunks
    before = part.to(tl.int64) * (tl.num_programs(0) // sizes.parts) * count
    for turn in range(first, stop):
        at = row_head * count + (count - 1 - turn)
        if turn > 0:
            meet(meeting, row_head, turn, sizes)
            of_wrong = sum_of_terms(meeting, row_head, turn - 1, tokens, channels, sizes)
            finish(given, found, of_wrong, gain, inside, row_head, part, before, at + 1, tokens, channels, sizes)
            # the blocks of the matrices' gradients were written by other threads than those that read them
            tl.debug_barrier()
        if turn < count:
            of_wrong = through_steps(given, found, row_head, part, before, at, tokens, channels, sizes)
            store_terms(meeting, of_wrong, row_head, part, turn, tokens, channels, sizes)


@triton.jit
def finish(given, found, of_wrong, gain, inside, row_head, part, before, at, tokens, channels, sizes):
    """Write the gradients of inner chunk `at`'s keys and values and of W as it starts, given that of r [T, D]."""
    of_tokens = at * sizes.tokens * sizes.width
    key = load_block(given.written.inputs[0] + of_tokens, tokens, channels, sizes.tokens, sizes.width)
    value = load_block(given.value + of_tokens, tokens, channels, sizes.tokens, sizes.width)
    answered = load_block(given.written.answered + of_tokens, tokens, channels, sizes.tokens, sizes.width)
    of_answered, of_slope, of_weight = error_gradients(of_wrong, answered, key, value, gain, inside, sizes)
    of_key = found.key + (before + at) * sizes.tokens * sizes.width
    of_key_block = load_block(of_key, tokens, channels, sizes.tokens, sizes.width)
    if part == 0:
        store_block(found.value + of_tokens, -of_slope, tokens, channels, sizes.tokens, sizes.width)
        if found.weight is not None:
            tl.store(found.weight + at * sizes.width + channels, tl.sum(of_weight, 0), mask=channels < sizes.width)
        if sizes.squared and sizes.residual:
            of_key_block += of_slope
    of_key_block = through_tokens(
        given, found, of_key_block, of_answered, row_head, part, at, tokens, channels, sizes
    )  # fmt: skip
    store_block(of_key, of_key_block, tokens, channels, sizes.tokens, sizes.width)


@triton.jit
def through_steps(given, found, row_head, part, before, at, tokens, channels, sizes):
    """Return a part's terms of the gradient of r [T, D] through inner chunk `at`'s steps, its reads and d.

    Write those of the keys' and the shares' gradients through the steps and reads. Those of d and h, which are wider,
    take the places of what came from the reads. One matrix after the other: the accumulators of both would not fit into
    the registers.
    """
    written, shares, reads = given.written, given.shares, given.reads
    step = load_numbers(shares.step + at * sizes.tokens, tokens, sizes.tokens)[:, None]
    momentum_step = step
    if shares.momentum is not None:
        momentum_step = load_numbers(shares.momentum_step + at * sizes.tokens, tokens, sizes.tokens)[:, None]
    of_step, of_momentum_step = tl.zeros_like(step), tl.zeros_like(step)
    of_lost = tl.zeros((sizes.channel_block,), step.dtype)
    of_carried, of_kept = tl.zeros_like(of_lost), tl.zeros_like(of_lost)
    of_tokens = at * sizes.tokens * sizes.width
    of_found = of_step, of_momentum_step, of_lost, of_carried, of_kept
    # what comes from the reads is the first part's
    of_key = first_parts(reads[0].inputs + of_tokens, part, tokens, channels, sizes)
    of_key, of_found = through_matrix(
        0, reads[0].change, written.changes[0], written.inputs[0], of_key, of_found, step, momentum_step,
        given, found, row_head, part, at, tokens, channels, sizes,
    )  # fmt: skip
    to = found.key + (before + at) * sizes.tokens * sizes.width
    store_block(to, of_key, tokens, channels, sizes.tokens, sizes.width)
    of_wrong = first_parts(reads[1].change + of_tokens, part, tokens, channels, sizes)
    of_wrong, of_found = through_matrix(
        1, reads[1].inputs, written.inputs[1], written.changes[1], of_wrong, of_found, step, momentum_step,
        given, found, row_head, part, at, tokens, channels, sizes,
    )  # fmt: skip
    store_shares(found, before + at, of_found, tokens, sizes)
    return of_wrong


@triton.jit
def first_parts(pointer, part, tokens, channels, sizes):
    """Return a block [T, D] for the first part of a head's inner units, zeros for the others."""
    mine = tl.where(part == 0, tokens, sizes.tokens)
    return load_block(pointer, mine, channels, sizes.tokens, sizes.width)


@triton.jit
def through_matrix(
    matrix: tl.constexpr, reads_wide, wide, narrow, of_narrow, of_found, step, momentum_step, given, found, row_head,
    part, at, tokens, channels, sizes,
):  # fmt: skip
    """Return the gradients of a matrix's narrower factor [T, D] and of the shares, and write that of the wider one.

    The last matrix takes part in d too: what comes by that way is added to the gradient of r.
    """
    written, shares = given.written, given.shares
    of_tokens, of_hidden = at * sizes.tokens * sizes.width, at * sizes.tokens * sizes.inner
    of_matrix, of_gradient = at * sizes.inner * sizes.width, row_head * sizes.inner * sizes.width
    of_step, of_momentum_step, of_lost, of_carried, of_kept = of_found
    narrow_block = load_block(narrow + of_tokens, tokens, channels, sizes.tokens, sizes.width)
    for begin in range(0, sizes.part_units, sizes.unit_block):
        units = part * sizes.part_units + begin + tl.arange(0, sizes.unit_block)
        of_weights = load_units(found.weights[matrix] + of_gradient, units, channels, matrix, sizes)
        wide_block = load_block(wide + of_hidden, tokens, units, sizes.tokens, sizes.inner)
        of_wide = load_block(reads_wide + of_hidden, tokens, units, sizes.tokens, sizes.inner)
        of_wide, of_narrow, of_step = through_outer(
            of_wide, of_narrow, of_step, wide_block, narrow_block, step, of_weights, sizes
        )
        if shares.lost is not None or matrix == 1:
            weights = load_units(written.weights[matrix] + of_matrix, units, channels, matrix, sizes)
            if shares.lost is not None:
                of_lost += tl.sum(of_weights * weights, 0)
            if matrix == 1:
                hidden = load_block(written.hidden + of_hidden, tokens, units, sizes.tokens, sizes.inner)
                of_slope = load_block(given.reads[0].change + of_hidden, tokens, units, sizes.tokens, sizes.inner)
                of_back = of_slope * (below(hidden) + hidden * density(hidden))
                of_narrow = add_product(of_narrow, of_back, weights, sizes.precision)
        if shares.momentum is not None:
            momentum = load_units(written.momentum[matrix] + of_matrix, units, channels, matrix, sizes)
            of_carried += tl.sum(of_weights * momentum, 0)
            of_momentum = load_units(found.momentum[matrix] + of_gradient, units, channels, matrix, sizes)
            of_kept += tl.sum(of_momentum * momentum, 0)
            of_wide, of_narrow, of_momentum_step = through_outer(
                of_wide, of_narrow, of_momentum_step, wide_block, narrow_block, momentum_step, of_momentum, sizes
            )
        store_block(reads_wide + of_hidden, of_wide, tokens, units, sizes.tokens, sizes.inner)
    # the other matrix and the other pass read these blocks in other threads
    tl.debug_barrier()
    return of_narrow, (of_step, of_momentum_step, of_lost, of_carried, of_kept)


@triton.jit
def through_outer(of_wide, of_narrow, of_share, wide, narrow, share, of_matrix, sizes):
    """Return the gradients of the factors and shares of - sum_t share_t wide_t narrow_t^T [I, D], with what there was.

    wide: [T, I]; narrow: [T, D]; share: [T, 1]; of_matrix: the gradient of the sum [I, D].
    """
    by_narrow = product(narrow, tl.trans(of_matrix), sizes.precision)
    of_narrow = add_product(of_narrow, -share * wide, of_matrix, sizes.precision)
    return of_wide - share * by_narrow, of_narrow, of_share - tl.sum(wide * by_narrow, 1, keep_dims=True)


@triton.jit
def store_shares(found, at, of_found, tokens, sizes):
    """Write the gradients of an inner chunk's shares: those of tokens [T, 1], the others by channel [D]."""
    of_step, of_momentum_step, of_lost, of_carried, of_kept = of_found
    inside, places = (tokens < sizes.tokens)[:, None], (at * sizes.tokens + tokens)[:, None]
    tl.store(found.step + places, of_step, mask=inside)
    if found.lost is not None:
        tl.store(found.lost + at, tl.sum(of_lost, 0))
    if found.kept is not None:
        tl.store(found.momentum_step + places, of_momentum_step, mask=inside)
        tl.store(found.last_carried + at, tl.sum(of_carried, 0))
        tl.store(found.kept + at, tl.sum(of_kept, 0))


@triton.jit
def through_tokens(given, found, of_key, of_answered, row_head, part, at, tokens, channels, sizes):
    """Return a part's terms of the gradient of keys [T, D] through z.

    The gradients of W and S become those as `at` starts. The last matrix first: the gradient of z takes the place of
    that of h.
    """
    written, reads = given.written, given.reads
    of_tokens, of_hidden = at * sizes.tokens * sizes.width, at * sizes.tokens * sizes.inner
    of_matrix, of_gradient = at * sizes.inner * sizes.width, row_head * sizes.inner * sizes.width
    for begin in range(0, sizes.part_units, sizes.unit_block):
        units = part * sizes.part_units + begin + tl.arange(0, sizes.unit_block)
        of_active = load_block(reads[1].inputs + of_hidden, tokens, units, sizes.tokens, sizes.inner)
        of_down = load_units(found.weights[1] + of_gradient, units, channels, 1, sizes)
        new_down = faded_gradient(of_down, given, at)
        if sizes.squared or sizes.eps is not None:
            down = load_units(written.weights[1] + of_matrix, units, channels, 1, sizes)
            of_active = add_product(of_active, of_answered, tl.trans(down), sizes.precision)
            active = load_block(written.inputs[1] + of_hidden, tokens, units, sizes.tokens, sizes.inner)
            new_down = add_product(new_down, tl.trans(active), of_answered, sizes.precision)
        of_slope = load_block(reads[0].change + of_hidden, tokens, units, sizes.tokens, sizes.inner)
        hidden = load_block(written.hidden + of_hidden, tokens, units, sizes.tokens, sizes.inner)
        back = load_block(written.back + of_hidden, tokens, units, sizes.tokens, sizes.inner)
        slope_at = below(hidden) + hidden * density(hidden)
        of_z = of_slope * back * density(hidden) * (2.0 - hidden * hidden) + of_active * slope_at
        store_block(reads[1].inputs + of_hidden, of_z, tokens, units, sizes.tokens, sizes.inner)
        wrong = load_block(written.changes[1] + of_tokens, tokens, channels, sizes.tokens, sizes.width)
        new_down = add_product(new_down, tl.trans(of_slope * slope_at), wrong, sizes.precision)
        add_reads(1, of_down, new_down, given, found, row_head, at, tokens, channels, units, sizes)
    tl.debug_barrier()
    for begin in range(0, sizes.part_units, sizes.unit_block):
        units = part * sizes.part_units + begin + tl.arange(0, sizes.unit_block)
        up = load_units(written.weights[0] + of_matrix, units, channels, 0, sizes)
        of_z = load_block(reads[1].inputs + of_hidden, tokens, units, sizes.tokens, sizes.inner)
        of_key = add_product(of_key, of_z, up, sizes.precision)
        key = load_block(written.inputs[0] + of_tokens, tokens, channels, sizes.tokens, sizes.width)
        of_up = load_units(found.weights[0] + of_gradient, units, channels, 0, sizes)
        new_up = add_product(faded_gradient(of_up, given, at), tl.trans(of_z), key, sizes.precision)
        add_reads(0, of_up, new_up, given, found, row_head, at, tokens, channels, units, sizes)
    return of_key


@triton.jit
def faded_gradient(of_weights, given, at):
    """Return (1 + c) of the gradient of W after inner chunk `at`."""
    if given.shares.lost is not None:
        of_weights = (1.0 + tl.load(given.shares.lost + at)) * of_weights
    return of_weights


@triton.jit
def add_reads(
    matrix: tl.constexpr, of_weights, new_weights, given, found, row_head, at, tokens, channels, units, sizes
):  # fmt: skip
    """Write the gradients of a block of W and S as inner chunk `at` starts, with what the reads hand on.

    of_weights: that of W after it [I, D]; new_weights: that of W as it starts, but for the reads.
    """
    of_gradient, shares, reads = row_head * sizes.inner * sizes.width, given.shares, given.reads[matrix]
    new_weights = add_factors(new_weights, reads.weights, at, tokens, channels, units, matrix, sizes)
    store_units(found.weights[matrix] + of_gradient, new_weights, units, channels, matrix, sizes)
    if shares.momentum is not None:
        carried, kept = tl.load(shares.last_carried + at), tl.load(shares.momentum + at)
        of_momentum = load_units(found.momentum[matrix] + of_gradient, units, channels, matrix, sizes)
        of_momentum = add_factors(
            carried * of_weights + kept * of_momentum, reads.momentum, at, tokens, channels, units, matrix, sizes
        )
        store_units(found.momentum[matrix] + of_gradient, of_momentum, units, channels, matrix, sizes)


@triton.jit
def add_factors(x, factors, at, tokens, channels, units, matrix: tl.constexpr, sizes):
    """Return x [I, D] with the sum of outer products over the tokens of all heads that read the memory."""
    wide = factors.inputs if matrix else factors.out
    narrow = factors.out if matrix else factors.inputs
    for head in range(sizes.query_heads):
        first = (at * sizes.query_heads + head) * sizes.tokens
        of_units = load_block(wide + first * sizes.inner, tokens, units, sizes.tokens, sizes.inner)
        of_channels = load_block(narrow + first * sizes.width, tokens, channels, sizes.tokens, sizes.width)
        x = add_product(x, tl.trans(of_units), of_channels, sizes.precision)
    return x
