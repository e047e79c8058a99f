"""Kernels of kept networks of which each row reads a few: what the chosen ones answer, and the gradients.

The equations are those of `kept_networks.py`. Pairs of a row and a network that it reads stand in the order of the
networks (`selected_networks.py`). A program takes a block of one network's pairs, of which it gathers the rows:

    answer_pairs           w LN(m) of each pair, to a place of its own: nothing is added up by several programs
    through_pairs          m anew, then _w, _m and _q of each pair; leaves _m in the device's memory
    through_pair_matrices  a block of a network's inner units: over all of its pairs, _U and _V

How many pairs a network has is known to the device alone. There are programs for as many as there may be, of which
those without pairs end at once: the host waits for nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from megamem.ops.deep_memory.triton.blocks import load_block, store_block, unit_and_inverse
from megamem.ops.deep_memory.triton.kept import add_matrix_gradients, answer, through_network, through_norm


class Given(NamedTuple):
    """What the kernels read. P: pairs that there may be, R times K networks that a row reads at most."""

    rows: Tensor
    """q [B, H, R, D], in the dtype of products."""
    shares: Tensor
    """w [B, H, R, N], in the dtype of sums."""
    up: Tensor
    """U of one list of networks, [B, H, n, I, D]"""
    down: Tensor
    """Its V [B, H, n, I, D]"""
    order: Tensor
    """Pairs by network, [B, H, P]: each is its row times K plus which of the row's networks it is."""
    begins: Tensor
    """Where the pairs of each network begin, and where those of the last one end, [B, H, N + 1]."""


class Place(NamedTuple):
    """Where a list of networks lies among all."""

    height: int
    """R"""
    count: int
    """Networks of the list."""
    first: int
    """How many there are in the lists before it."""
    total: int
    """N"""
    each: tl.constexpr
    """K"""


class Found(NamedTuple):
    """What the backward kernels write."""

    rows: Tensor
    """Gradients of rows by pair, [B, H, R, K, D], in the dtype of products."""
    shares: Tensor
    """[B, H, R, N]; what no row reads is left as it is."""
    made: Tensor
    """Gradients of m by pair in the order of networks, [B, H, P, D], in the dtype of products."""
    up: Tensor
    """[B, H, n, I, D], as `down`."""
    down: Tensor


@triton.jit
def answer_pairs_kernel(given: Given, parts, place: Place, sizes):
    """Write what each pair adds to its row's answer to `parts` [B, H, R, K, D]."""
    head, n, channels = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, sizes.channel_block)
    first, last = span(given, head, n, place)
    begin = first + tl.program_id(2) * sizes.row_block
    if begin < last:
        at = begin + tl.arange(0, sizes.row_block)
        pair, rows = load_pairs(given.rows, given, head, at, last, channels, place, sizes)
        share = tl.load(given.shares + share_of(head, pair, n, place), mask=at < last, other=0.0)
        of_matrix = (head * place.count + n) * sizes.inner * sizes.width
        sums = tl.zeros((sizes.row_block, sizes.channel_block), given.shares.dtype.element_ty)
        made = answer(given, rows, of_matrix, channels, sums, sizes)
        if sizes.eps is not None:
            made, _ = unit_and_inverse(made, (channels < sizes.width)[None, :], sizes)
        store_pairs(parts, share[:, None] * made, head, pair, at < last, channels, place, sizes)


@triton.jit
def through_pairs_kernel(given: Given, of_total, found: Found, place: Place, sizes):
    """Fill `found` but for the matrices, given the gradient of the sum of each row's answers [B, H, R, D]."""
    head, n, channels = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, sizes.channel_block)
    first, last = span(given, head, n, place)
    begin = first + tl.program_id(2) * sizes.row_block
    if begin < last:
        at, inside = begin + tl.arange(0, sizes.row_block), (channels < sizes.width)[None, :]
        pair, rows = load_pairs(given.rows, given, head, at, last, channels, place, sizes)
        _, of_sum = load_pairs(of_total, given, head, at, last, channels, place, sizes)
        of_share = share_of(head, pair, n, place)
        share = tl.load(given.shares + of_share, mask=at < last, other=0.0)
        of_matrix = (head * place.count + n) * sizes.inner * sizes.width
        of_rows = tl.zeros((sizes.row_block, sizes.channel_block), of_sum.dtype)
        made = answer(given, rows, of_matrix, channels, of_rows, sizes)
        made, of_made = through_norm(made, share[:, None] * of_sum, inside, sizes)
        tl.store(found.shares + of_share, tl.sum(of_sum * made, 1), mask=at < last)
        of_made = of_made.to(rows.dtype)
        places = (head * place.height * place.each + at)[:, None] * sizes.width + channels[None, :]
        tl.store(found.made + places, of_made, mask=(at < last)[:, None] & inside)
        of_rows = through_network(given, rows, of_made, of_rows, of_matrix, channels, sizes)
        store_pairs(found.rows, of_rows, head, pair, at < last, channels, place, sizes)


@triton.jit
def through_pair_matrices_kernel(given: Given, found: Found, place: Place, sizes):
    """Fill the gradients of the matrices, given those of m that `through_pairs_kernel` has written."""
    head, n = tl.program_id(0).to(tl.int64), tl.program_id(1)
    units = tl.program_id(2) * sizes.unit_block + tl.arange(0, sizes.unit_block)
    channels = tl.arange(0, sizes.channel_block)
    of_matrix = (head * place.count + n) * sizes.inner * sizes.width
    first, last = span(given, head, n, place)
    up = load_block(given.up + of_matrix, units, channels, sizes.inner, sizes.width)
    down = load_block(given.down + of_matrix, units, channels, sizes.inner, sizes.width)
    of_up = tl.zeros((sizes.unit_block, sizes.channel_block), given.shares.dtype.element_ty)
    of_down = tl.zeros_like(of_up)
    up, down = up.to(given.rows.dtype.element_ty), down.to(given.rows.dtype.element_ty)
    for begin in range(first, last, sizes.row_block):
        at = begin + tl.arange(0, sizes.row_block)
        _, rows = load_pairs(given.rows, given, head, at, last, channels, place, sizes)
        places = (head * place.height * place.each + at)[:, None] * sizes.width + channels[None, :]
        inside = (at < last)[:, None] & (channels < sizes.width)[None, :]
        of_made = tl.load(found.made + places, mask=inside, other=0.0)
        of_up, of_down = add_matrix_gradients(of_up, of_down, rows, of_made, up, down, sizes)
    store_block(found.up + of_matrix, of_up, units, channels, sizes.inner, sizes.width)
    store_block(found.down + of_matrix, of_down, units, channels, sizes.inner, sizes.width)


@triton.jit
def span(given, head, n, place):
    """Return where the pairs of a network begin and end among those of its head."""
    begins = given.begins + head * (place.total + 1) + place.first + n
    return tl.load(begins), tl.load(begins + 1)


@triton.jit
def share_of(head, pair, n, place):
    """Return where the share of a network of the list is that a pair's row gives it, in [B, H, R, N]."""
    return (head * place.height + pair // place.each) * place.total + place.first + n


@triton.jit
def load_pairs(pointer, given, head, at, last, channels, place, sizes):
    """Return pairs [R] and the rows of theirs in [B, H, R, D], [R, D]; zeros beyond the last one."""
    pair = tl.load(given.order + head * place.height * place.each + at, mask=at < last, other=0)
    places = (head * place.height + pair // place.each)[:, None] * sizes.width + channels[None, :]
    inside = (at < last)[:, None] & (channels < sizes.width)[None, :]
    return pair, tl.load(pointer + places, mask=inside, other=0.0)


@triton.jit
def store_pairs(pointer, block, head, pair, inside, channels, place, sizes):
    """Write a block [R, D] to the places of its pairs in [B, H, R, K, D]."""
    places = (head * place.height * place.each + pair)[:, None] * sizes.width + channels[None, :]
    tl.store(pointer + places, block, mask=inside[:, None] & (channels < sizes.width)[None, :])
