"""Kernels of kept networks: what they answer together, and the gradients of queries, shares and matrices.

The equations are those of `kept_networks.py`. A program of the forward pass answers a block of rows: it goes through
the networks that some of them read, and through blocks of inner units of each, so that no hidden layer leaves the
multiprocessor. The backward pass takes two kernels, as a row's sums go over networks and units, a matrix's over rows:

    through_rows      a block of rows: m anew, then _w, _m and _q; leaves _m in the device's memory
    through_matrices  a block of a network's inner units: over all rows that read it, _U and _V

Letters of shapes: R rows, D channels (filled up with zeros to a power of two), I inner units of a block, N networks.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from megamem.ops.deep_memory.triton.blocks import (
    add_product,
    below,
    density,
    load_block,
    store_block,
    unit_and_inverse,
)


class Sizes(NamedTuple):
    """Constants of the kernels, `tl.constexpr` each."""

    width: tl.constexpr
    """Channels of a head, of queries and answers."""
    inner: tl.constexpr
    """Inner units of a network."""
    row_block: tl.constexpr
    """Rows of a program."""
    channel_block: tl.constexpr
    """The power of two that holds all channels."""
    unit_block: tl.constexpr
    """Inner units that are on the chip at a time."""
    eps: tl.constexpr
    """The number added to the layer norm's variance; None: there is no norm."""
    precision: tl.constexpr
    """How products take FP32 factors: tf32, tf32x3 or ieee."""


class Given(NamedTuple):
    """What the kernels read. B H: heads of all rows of the batch."""

    rows: Tensor
    """q [B, H, R, D], in the dtype of products."""
    shares: Tensor
    """w [B, H, R, N], in the dtype of sums."""
    up: Tensor
    """U [B, H, N, I, D]"""
    down: Tensor
    """V [B, H, N, I, D]"""
    spans: Tensor
    """The first row that reads each network, and the first one after it that does not, [N, 2] int32."""


class Found(NamedTuple):
    """What the backward kernels write."""

    rows: Tensor
    """[B, H, R, D], in the dtype of products."""
    shares: Tensor
    """[B, H, R, N]; what is outside of the spans is left as it is."""
    made: Tensor
    """That of m [B, H, N, R, D], in the dtype of products; only blocks of rows that read a network are written."""
    up: Tensor
    """[B, H, N, I, D], as `down`."""
    down: Tensor


@triton.jit
def answer_kernel(given: Given, total, height, count, sizes):
    """Write the sum of the networks' answers to `total` [B, H, R, D]. height: R; count: N."""
    head, begin = tl.program_id(0).to(tl.int64), tl.program_id(1) * sizes.row_block
    at, channels = begin + tl.arange(0, sizes.row_block), tl.arange(0, sizes.channel_block)
    rows = load_rows(given.rows + head * height * sizes.width, at, channels, height, sizes)
    inside = (channels < sizes.width)[None, :]
    found = tl.zeros((sizes.row_block, sizes.channel_block), total.dtype.element_ty)
    for n in range(count):
        first, last = tl.load(given.spans + 2 * n), tl.load(given.spans + 2 * n + 1)
        if (begin < last) & (begin + sizes.row_block > first):
            of_matrix = (head * count + n) * sizes.inner * sizes.width
            made = answer(given, rows, of_matrix, channels, found, sizes)
            if sizes.eps is not None:
                made, _ = unit_and_inverse(made, inside, sizes)
            share = load_share(given, head, at, n, first, last, height, count)
            found += share * made
    store_rows(total + head * height * sizes.width, found, at, channels, height, sizes)


@triton.jit
def through_rows_kernel(given: Given, of_total, found: Found, height, count, sizes):
    """Fill `found` but for the matrices, given the gradient of the sum [B, H, R, D]."""
    head, begin = tl.program_id(0).to(tl.int64), tl.program_id(1) * sizes.row_block
    at, channels = begin + tl.arange(0, sizes.row_block), tl.arange(0, sizes.channel_block)
    rows = load_rows(given.rows + head * height * sizes.width, at, channels, height, sizes)
    of_sum = load_rows(of_total + head * height * sizes.width, at, channels, height, sizes)
    inside = (channels < sizes.width)[None, :]
    of_rows = tl.zeros((sizes.row_block, sizes.channel_block), of_sum.dtype)
    for n in range(count):
        first, last = tl.load(given.spans + 2 * n), tl.load(given.spans + 2 * n + 1)
        if (begin < last) & (begin + sizes.row_block > first):
            of_matrix = (head * count + n) * sizes.inner * sizes.width
            made = answer(given, rows, of_matrix, channels, of_rows, sizes)
            share = load_share(given, head, at, n, first, last, height, count)
            made, of_made = through_norm(made, share * of_sum, inside, sizes)
            reads = (at >= first) & (at < last)
            tl.store(found.shares + (head * height + at) * count + n, tl.sum(of_sum * made, 1), mask=reads)
            of_made = of_made.to(rows.dtype)
            of_made_rows = found.made + (head * count + n) * height * sizes.width
            store_rows(of_made_rows, of_made, at, channels, height, sizes)
            of_rows = through_network(given, rows, of_made, of_rows, of_matrix, channels, sizes)
    store_rows(found.rows + head * height * sizes.width, of_rows, at, channels, height, sizes)


@triton.jit
def through_matrices_kernel(given: Given, found: Found, height, count, sizes):
    """Fill the gradients of the matrices, given those of m that `through_rows_kernel` has written."""
    head, n = tl.program_id(0).to(tl.int64), tl.program_id(1)
    units = tl.program_id(2) * sizes.unit_block + tl.arange(0, sizes.unit_block)
    channels = tl.arange(0, sizes.channel_block)
    of_matrix = (head * count + n) * sizes.inner * sizes.width
    first, last = tl.load(given.spans + 2 * n), tl.load(given.spans + 2 * n + 1)
    up = load_block(given.up + of_matrix, units, channels, sizes.inner, sizes.width)
    down = load_block(given.down + of_matrix, units, channels, sizes.inner, sizes.width)
    of_up = tl.zeros((sizes.unit_block, sizes.channel_block), given.shares.dtype.element_ty)
    of_down = tl.zeros_like(of_up)
    up, down = up.to(given.rows.dtype.element_ty), down.to(given.rows.dtype.element_ty)
    # an empty span has no rows: a loop from any row to itself
    for begin in range(first // sizes.row_block * sizes.row_block, tl.where(first < last, last, 0), sizes.row_block):
        at = begin + tl.arange(0, sizes.row_block)
        rows = load_rows(given.rows + head * height * sizes.width, at, channels, height, sizes)
        of_made = load_rows(found.made + (head * count + n) * height * sizes.width, at, channels, height, sizes)
        of_up, of_down = add_matrix_gradients(of_up, of_down, rows, of_made, up, down, sizes)
    store_block(found.up + of_matrix, of_up, units, channels, sizes.inner, sizes.width)
    store_block(found.down + of_matrix, of_down, units, channels, sizes.inner, sizes.width)


@triton.jit
def answer(given, rows, of_matrix, channels, like, sizes):
    """Return m [R, D], what a network makes of rows [R, D]; like: a block of the sums' dtype."""
    made = tl.zeros_like(like)
    for begin in range(0, sizes.inner, sizes.unit_block):
        units = begin + tl.arange(0, sizes.unit_block)
        up = load_block(given.up + of_matrix, units, channels, sizes.inner, sizes.width).to(rows.dtype)
        hidden = tl.dot(rows, tl.trans(up), input_precision=sizes.precision, out_dtype=like.dtype)
        down = load_block(given.down + of_matrix, units, channels, sizes.inner, sizes.width).to(rows.dtype)
        made = add_product(made, (hidden * below(hidden)).to(rows.dtype), down, sizes.precision)
    return made


@triton.jit
def through_network(given, rows, of_made, of_rows, of_matrix, channels, sizes):
    """Return the gradient of rows [R, D] with what a network adds to it, given that of m [R, D]."""
    for begin in range(0, sizes.inner, sizes.unit_block):
        units = begin + tl.arange(0, sizes.unit_block)
        up = load_block(given.up + of_matrix, units, channels, sizes.inner, sizes.width).to(rows.dtype)
        hidden = tl.dot(rows, tl.trans(up), input_precision=sizes.precision, out_dtype=of_rows.dtype)
        down = load_block(given.down + of_matrix, units, channels, sizes.inner, sizes.width).to(rows.dtype)
        of_hidden = tl.dot(of_made, tl.trans(down), input_precision=sizes.precision, out_dtype=of_rows.dtype)
        of_hidden *= below(hidden) + hidden * density(hidden)
        of_rows = add_product(of_rows, of_hidden.to(rows.dtype), up, sizes.precision)
    return of_rows


@triton.jit
def through_norm(made, of_answer, inside, sizes):
    """Return what a network answers, LN(m), and the gradient of m, from that of the answer; all [R, D]."""
    if sizes.eps is None:
        return made, of_answer
    else:
        unit, inverse = unit_and_inverse(made, inside, sizes)
        total, along = tl.sum(of_answer, 1, keep_dims=True), tl.sum(of_answer * unit, 1, keep_dims=True)
        return unit, tl.where(inside, inverse * (of_answer - (total + along * unit) / sizes.width), 0.0)


@triton.jit
def add_matrix_gradients(of_up, of_down, rows, of_made, up, down, sizes):
    """Return the gradients of a block of U and V [I, D] with what rows [R, D] add, given those of m [R, D]."""
    hidden = tl.dot(rows, tl.trans(up), input_precision=sizes.precision, out_dtype=of_up.dtype)
    probability = below(hidden)
    active = (hidden * probability).to(rows.dtype)
    of_down = add_product(of_down, tl.trans(active), of_made, sizes.precision)
    of_hidden = tl.dot(of_made, tl.trans(down), input_precision=sizes.precision, out_dtype=of_up.dtype)
    of_hidden *= probability + hidden * density(hidden)
    return add_product(of_up, tl.trans(of_hidden.to(rows.dtype)), rows, sizes.precision), of_down


@triton.jit
def load_rows(pointer, at, channels, height, sizes):
    """Return rows of a matrix [height, D], zeros beyond it."""
    inside = (at[:, None] < height) & (channels[None, :] < sizes.width)
    return tl.load(pointer + at[:, None] * sizes.width + channels[None, :], mask=inside, other=0.0)


@triton.jit
def store_rows(pointer, block, at, channels, height, sizes):
    """Write a block to rows of a matrix [height, D], nothing beyond it."""
    inside = (at[:, None] < height) & (channels[None, :] < sizes.width)
    tl.store(pointer + at[:, None] * sizes.width + channels[None, :], block, mask=inside)


@triton.jit
def load_share(given, head, at, n, first, last, height, count):
    """Return the shares of rows in network n [R, 1], zero where they do not read it."""
    reads = (at >= first) & (at < last)
    return tl.load(given.shares + (head * height + at) * count + n, mask=reads, other=0.0)[:, None]
