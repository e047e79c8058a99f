"""What the kernels of Memora's networks share: rows on the simplex, and their first tokens.

The equations are those of `simplex.py`. The first matrix's rows are distributions over a head's channels, all of which
a block of inner units holds. The last matrix's are distributions over the inner units: their sums take a pass by
themselves.
Letters of shapes as in `blocks.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from megamem.ops.deep_memory.triton.blocks import load_block, load_numbers, load_units


class Sizes(NamedTuple):
    """Constants of a kernel, `tl.constexpr` each; those of `blocks.Sizes` mean the same."""

    tokens: tl.constexpr
    width: tl.constexpr
    inner: tl.constexpr
    token_block: tl.constexpr
    channel_block: tl.constexpr
    unit_block: tl.constexpr
    squared: tl.constexpr
    residual: tl.constexpr
    eps: tl.constexpr
    precision: tl.constexpr
    first_sum: tl.constexpr
    """c of the first matrix."""
    last_sum: tl.constexpr
    """c of the last one."""
    first_log: tl.constexpr
    """log c of the first matrix."""
    last_log: tl.constexpr
    """log c of the last one."""
    shifting: tl.constexpr
    """Whether there are decays, which change the sums of the first matrix's rows."""


class Written(NamedTuple):
    """What writing the inner chunks of a group has made."""

    up: Tensor
    """L of the first matrix as each inner chunk starts, [B, H, N, I, D]."""
    down: Tensor
    """L of the last one, [B, H, N, D, I]."""
    hidden: Tensor
    """z [B, H, N, T, I]"""
    active: Tensor
    """h [B, H, N, T, I]"""
    back: Tensor
    """W2^T r [B, H, N, T, I]"""
    change: Tensor
    """d [B, H, N, T, I]"""
    answered: Tensor
    """What the last matrix makes of the keys, [B, H, N, T, D]."""
    wrong: Tensor
    """r [B, H, N, T, D]"""


@triton.jit
def inside_block(units, channels, sizes):
    """Return which numbers of a block [I, D] belong to the matrix."""
    return (units < sizes.inner)[:, None] & (channels < sizes.width)[None, :]


@triton.jit
def row_softmax(logs, valid, sizes):
    """Return c softmax of each row of logs [I, D] of the first matrix, zeros outside of it, and its logarithm."""
    masked = tl.where(valid, logs, -1e30)
    shifted = masked - tl.max(masked, 1, keep_dims=True)
    exact = shifted - tl.log(tl.sum(tl.where(valid, tl.exp(shifted), 0.0), 1, keep_dims=True) + 1e-37)
    exact = tl.where(valid, exact + sizes.first_log, 0.0)
    return tl.where(valid, tl.exp(exact), 0.0), exact


@triton.jit
def first_matrix(pointer, units, channels, sizes):
    """Return a block of W0 and its logarithms [I, D]; where the sums of rows are not followed, L as it is."""
    logs = load_units(pointer, units, channels, 0, sizes)
    weights, exact = row_softmax(logs, inside_block(units, channels, sizes), sizes)
    if sizes.shifting:
        return weights, exact
    else:
        return weights, logs


@triton.jit
def last_matrix(pointer, units, channels, sums, sizes):
    """Return a block of the last W0 and of L, [I, D] of the transposes; sums: see `column_sums`."""
    logs = load_units(pointer, units, channels, 1, sizes)
    return column_softmax(logs, sums, units, channels, sizes), logs


@triton.jit
def column_softmax(logs, sums, units, channels, sizes):
    """Return c softmax of each column of a block of logs [I, D], zeros outside of the matrix; sums as below."""
    valid = inside_block(units, channels, sizes)
    return tl.where(valid, tl.exp(tl.where(valid, logs - sums[None, :], 0.0)), 0.0)


@triton.jit
def moved_last(pointer, active, units, channels, fade, step, sizes):
    """Return a block of L after the first token's step, fade L - h r^T, of the last matrix, and L; [I, D].

    active: where h of the first token lies; fade: its decays [D]; step: r times its rates [D].
    """
    logs = load_units(pointer, units, channels, 1, sizes)
    own = load_numbers(active, units, sizes.inner)
    return fade[None, :] * logs - own[:, None] * step[None, :], logs


@triton.jit
def add_column(top, total, logs, valid):
    """Return the largest logarithm of each column so far, and the sum of all over it, with a block [I, D] more."""
    masked = tl.where(valid, logs, -1e30)
    new = tl.maximum(top, tl.max(masked, 0))
    return new, total * tl.exp(top - new) + tl.sum(tl.where(valid, tl.exp(masked - new[None, :]), 0.0), 0)


@triton.jit
def column_sums(pointer, channels, like, sizes):
    """Return log(sum_i exp L_i / c) of each row of the last matrix [D, I]: [D]. like: a block of the same dtype."""
    top = tl.full((sizes.channel_block,), -1e30, like.dtype)
    total = tl.zeros((sizes.channel_block,), like.dtype)
    for begin in range(0, sizes.inner, sizes.unit_block):
        units = begin + tl.arange(0, sizes.unit_block)
        logs = load_units(pointer, units, channels, 1, sizes)
        top, total = add_column(top, total, logs, inside_block(units, channels, sizes))
    return column_logarithm(top, total, sizes)


@triton.jit
def column_logarithm(top, total, sizes):
    """Return log(sum / c) of columns, given what `add_column` has gathered."""
    return top + tl.log(total + 1e-37) - sizes.last_log


@triton.jit
def load_tokens(pointer, at, tokens, channels, sizes):
    """Return what the tokens of inner chunk `at` have, [T, D] of [..., T, D]."""
    return load_block(pointer + at * sizes.tokens * sizes.width, tokens, channels, sizes.tokens, sizes.width)


@triton.jit
def load_after(given, like, at, tokens, channels, sizes):
    """Return the product of the decays after each token [T, D], ones where there are none; like: of the same shape."""
    if given.after is None:
        return tl.zeros_like(like) + 1.0
    else:
        return load_tokens(given.after, at, tokens, channels, sizes)


@triton.jit
def load_fade(given, like, at, channels, sizes):
    """Return the product of an inner chunk's decays [D], ones where there are none; like: a block of the same dtype."""
    if given.fade is None:
        return tl.full((sizes.channel_block,), 1.0, like.dtype)
    else:
        return load_numbers(given.fade + at * sizes.width, channels, sizes.width)


@triton.jit
def first_token(given, wrong, like, at, channels, sizes):
    """Return the first token's decays, and its rates times key and r; [D] each. like: a block of the same dtype."""
    place = at * sizes.tokens * sizes.width
    rate = load_numbers(given.rate + place, channels, sizes.width)
    key = load_numbers(given.key + place, channels, sizes.width)
    error = load_numbers(wrong + place, channels, sizes.width)
    fade = tl.full((sizes.channel_block,), 1.0, like.dtype)
    if given.log_decay is not None:
        fade = tl.exp(load_numbers(given.log_decay + place, channels, sizes.width))
    return fade, rate * key, rate * error
