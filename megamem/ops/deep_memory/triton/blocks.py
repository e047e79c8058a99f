"""What the kernels are built from: blocks of matrices in and out of memory, and the functions of numbers and tokens.

The equations are those of `network.py`, `error.py` and `pointwise.py`. Letters of shapes: T tokens and D channels, each
filled up with zeros to a power of two, I inner units of a block.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class Sizes(NamedTuple):
    """Constants of a kernel, `tl.constexpr` each."""

    tokens: tl.constexpr
    """Tokens of an inner chunk."""
    width: tl.constexpr
    """Channels of a head."""
    inner: tl.constexpr
    """Inner units of its network."""
    query_heads: tl.constexpr
    """Heads that read one memory."""
    token_block: tl.constexpr
    """The power of two that holds all tokens."""
    channel_block: tl.constexpr
    """The power of two that holds all channels."""
    unit_block: tl.constexpr
    """Inner units that are on the chip at a time."""
    parts: tl.constexpr
    """Programs that share a head's inner units where its memory is written: see `meeting.py`."""
    part_units: tl.constexpr
    """Inner units of each of them."""
    squared: tl.constexpr
    """Whether the inner loss is the squared error, else the dot product."""
    residual: tl.constexpr
    """Whether M(x) has the term x."""
    eps: tl.constexpr
    """The number added to the layer norm's variance; None: there is no norm."""
    precision: tl.constexpr
    """How products take their factors: tf32, tf32x3 or ieee."""


@triton.jit
def load_block(pointer, rows, columns, height: tl.constexpr, width: tl.constexpr):
    """Return rows and columns of a matrix [height, width], zeros beyond it."""
    inside = (rows[:, None] < height) & (columns[None, :] < width)
    return tl.load(pointer + rows[:, None] * width + columns[None, :], mask=inside, other=0.0)


@triton.jit
def store_block(pointer, block, rows, columns, height: tl.constexpr, width: tl.constexpr):
    """Write a block to rows and columns of a matrix [height, width], nothing beyond it."""
    inside = (rows[:, None] < height) & (columns[None, :] < width)
    tl.store(pointer + rows[:, None] * width + columns[None, :], block, mask=inside)


@triton.jit
def load_numbers(pointer, at, count: tl.constexpr):
    """Return numbers of a vector [count], zeros beyond it."""
    return tl.load(pointer + at, mask=at < count, other=0.0)


@triton.jit
def load_units(pointer, units, channels, matrix: tl.constexpr, sizes):
    """Return a matrix's block of inner units [I, D]: of W2 [I, D] (0), or of the transpose of W1 [D, I] (1)."""
    if matrix == 0:
        return load_block(pointer, units, channels, sizes.inner, sizes.width)
    else:
        return tl.trans(load_block(pointer, channels, units, sizes.width, sizes.inner))


@triton.jit
def store_units(pointer, block, units, channels, matrix: tl.constexpr, sizes):
    """Write a matrix's block of inner units, as `load_units` returns it."""
    if matrix == 0:
        store_block(pointer, block, units, channels, sizes.inner, sizes.width)
    else:
        store_block(pointer, tl.trans(block), channels, units, sizes.width, sizes.inner)


@triton.jit
def following(series, last, row_head, n, count, sizes):
    """Return where a matrix of the inner chunk after n is: in the series, or in `last` after the group's last one."""
    size = sizes.inner * sizes.width
    return tl.where(n + 1 < count, series + (row_head * count + n + 1) * size, last + row_head * size)


@triton.jit
def product(a, b, precision: tl.constexpr):
    """Return a b."""
    return tl.dot(a, b, input_precision=precision, out_dtype=a.dtype)


@triton.jit
def add_product(x, a, b, precision: tl.constexpr):
    """Return x + a b."""
    return tl.dot(a, b, x, input_precision=precision, out_dtype=x.dtype)


@triton.jit
def below(x):
    """Return the normal distribution P(x)."""
    return 0.5 + 0.5 * tl.math.erf(x * 0.7071067811865476)


@triton.jit
def density(x):
    """Return the normal density p(x)."""
    return 0.3989422804014327 * tl.exp(-0.5 * x * x)


@triton.jit
def unit_and_inverse(y, inside, sizes):
    """Return n, y with mean 0 and variance 1, and 1 / s [T, 1]; y, inside and n: [T, D]."""
    centered = tl.where(inside, y - mean(y, sizes), 0.0)
    inverse = tl.rsqrt(mean(centered * centered, sizes) + sizes.eps)
    return centered * inverse, inverse


@triton.jit
def mean(x, sizes):
    """Return the mean over channels [T, 1] of x [T, D], which is zero beyond the last one."""
    return tl.sum(x, 1, keep_dims=True) / sizes.width


@triton.jit
def projected(a, unit, inside, sizes):
    """Return P a = a - mean(a) - n mean(a n); all [T, D]."""
    return tl.where(inside, a - mean(a, sizes) - unit * mean(a * unit, sizes), 0.0)


@triton.jit
def loss_slope(answer, key, value, sizes):
    """Return dl/dM(k); all [T, D]."""
    if sizes.squared:
        if sizes.residual:
            answer += key
        return 2.0 * (answer - value)
    else:
        return -value


@triton.jit
def output_error(y, key, value, gain, inside, sizes):
    """Return r = dl/dy of each token; all [T, D], and the norm's weight g [1, D]."""
    if sizes.eps is None:
        return loss_slope(y, key, value, sizes)
    else:
        unit, inverse = unit_and_inverse(y, inside, sizes)
        return inverse * projected(gain * loss_slope(gain * unit, key, value, sizes), unit, inside, sizes)


@triton.jit
def error_gradients(error, y, key, value, gain, inside, sizes):
    """Return the gradients of y, of M(k) where it is not through y, and of g, given that of `output_error`.

    All [T, D]; that of g is to be summed over tokens. The gradient of M(k) is that of k, and of -v, for the squared
    error; the dot product's is that of -v.
    """
    if sizes.eps is None:
        twice = 2.0 * error if sizes.squared else error
        return twice, twice, tl.zeros_like(error)
    else:
        unit, inverse = unit_and_inverse(y, inside, sizes)
        slope = loss_slope(gain * unit, key, value, sizes)
        a = gain * slope
        along = projected(a, unit, inside, sizes)
        scaled = inverse * error
        of_a = projected(scaled, unit, inside, sizes)
        of_unit = -scaled * mean(a * unit, sizes) - a * mean(scaled * unit, sizes)
        of_slope = gain * of_a
        of_gain = of_a * slope
        if sizes.squared:
            of_slope *= 2.0
            of_unit += gain * of_slope
            of_gain += of_slope * unit
        # back through n and 1 / s
        by_inverse = mean(of_unit * unit, sizes) + inverse * mean(error * along, sizes)
        of_y = inverse * (of_unit - unit * by_inverse)
        return tl.where(inside, of_y - mean(of_y, sizes), 0.0), of_slope, of_gain
