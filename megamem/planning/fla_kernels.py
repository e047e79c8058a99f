"""Kernels of flash-linear-attention's recurrences in the eyes of a ledger: what each reads, writes and multiplies.

Counted from the source of version 0.6 (`fla/ops/simple_gla`, `delta_rule`, `gated_delta_rule` and what they share). The
tokens of a head are cut into chunks of 64. One kernel goes through them in turn and writes the state S [keys, values]
before each; all others work on every chunk at the same time. Forward, of queries Q, keys K and values V:

    without a rate   S before each chunk; O = Q S + (Q K^T) V
    with a rate b    A = (I + lower part of b K K^T)^-1; W, U = A b K, A b V; S, and U - W S; O of these

The backward pass makes S (and W, U) again. Numbers are not computed: every result is zero.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megamem.ops.linear_recurrence.fla import Kernels
from megamem.planning.ledger import joined_as
from megamem.planning.operations import Kind, Operation, touched
from megamem.planning.tensors import tensors_in

CHUNK = 64
"""Tokens that a kernel multiplies at once."""
BLOCK = 64
"""Rows and columns of the part of a state for which one program goes through the chunks; under the delta rule it has
all rows."""
SOLVED = 1 / 3
"""What inverting a triangular matrix takes, in products of two such matrices."""


class _Sizes(NamedTuple):
    """The sizes of a call."""

    rows: int
    tokens: int
    heads: int
    keys: int
    values: int

    def products(self, states: float = 0, keys: float = 0, values: float = 0, chunks: float = 0) -> float:
        """Return the FLOPs of products over all chunks, of which the last is computed as if it were full.

        Args:
            states: products of a chunk's tokens with a state.
            keys, values: products of its tokens with its tokens, over the width of keys or of values.
            chunks: products of such products.
        """
        each = states * self.keys * self.values + CHUNK * (keys * self.keys + values * self.values + chunks * CHUNK)
        return 2.0 * self.rows * self.heads * self.chunks * CHUNK * each

    @property
    def chunks(self) -> int:
        """The chunks of a row."""
        return math.ceil(self.tokens / CHUNK)

    @property
    def states(self) -> tuple[int, ...]:
        """The shape of the states before all chunks."""
        return self.rows, self.chunks, self.heads, self.keys, self.values

    def programs(self, rate: bool) -> int:
        """Return the programs of the kernel that goes through the chunks in turn; rate: of the delta rule."""
        blocks = math.ceil(self.values / BLOCK) * (1 if rate else math.ceil(self.keys / BLOCK))
        return self.rows * self.heads * blocks


def _sizes(query: Tensor, value: Tensor) -> _Sizes:
    """Return the sizes of a call with query [rows, tokens, heads, keys] and value [rows, tokens, heads, values]."""
    rows, tokens, heads, keys = query.shape
    return _Sizes(rows, tokens, heads, keys, value.shape[-1])


def _kernel(flops: float, read: tuple[Tensor | None, ...], *made: Tensor | tuple[Any, ...], programs: int = 0) -> Any:
    """Return the results of a kernel, one or several [...], which a ledger sees as one operation.

    Args:
        flops: of its matrix products.
        read: what it reads, [...] each.
        made: what each of its results is like: a tensor [...], or a shape and a tensor of that dtype.
        programs: see `Operation`.
    """

    def as_kernel(_: object, out: tuple[Tensor, ...]) -> Operation:
        """Return the operation."""
        return Operation(Kind.MATMUL_BF16, flops, tuple(map(touched, tensors_in((*read, *out)))), programs)

    def results() -> tuple[Tensor, ...]:
        """Return zeros [...]."""
        like = [(x.shape, x) if isinstance(x, Tensor) else x for x in made]
        return tuple(x.new_zeros(shape) for shape, x in like)

    out = joined_as(as_kernel, results)
    return out[0] if len(out) == 1 else out


class _Recurrence(torch.autograd.Function):
    """All three recurrences: without a rate, with one, and with a decay besides."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, rate: Tensor | None, first: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return reads and last states, [rows, tokens, heads, values] and [series, heads, keys, values].

        q, k: [rows, tokens, heads, keys]; v: [rows, tokens, heads, values]; decay, rate: [rows, tokens, heads]; first:
        the states that series begin with.
        """
        sizes = _sizes(q, v)
        ctx.sizes = sizes
        if decay is not None:
            decay = _kernel(0.0, (decay,), decay)  # summed within chunks
        new, inverse, programs = v, None, sizes.programs(rate is not None)
        if rate is not None:
            inverse = _inverse(sizes, k, decay, rate)
            w, u = _kernel(sizes.products(keys=1, values=1), (k, v, rate, inverse, decay), k, v)
            states, new, last = _kernel(
                sizes.products(states=2), (k, w, u, decay, first), (sizes.states, k), v, first, programs=programs
            )
        else:
            states, last = _kernel(
                sizes.products(states=1), (k, v, decay, first), (sizes.states, k), first, programs=programs
            )
        read = _kernel(sizes.products(states=1, keys=1, values=1), (q, k, new, states, decay), v)
        ctx.save_for_backward(q, k, v, decay, rate, inverse, first)
        return read, last

    @staticmethod
    def backward(ctx: Any, of_read: Tensor, of_last: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of all operands from those of reads and last states, all [rows, tokens, heads, ...]."""
        q, k, v, decay, rate, inverse, first = ctx.saved_tensors
        sizes: _Sizes = ctx.sizes
        products, programs = sizes.products, sizes.programs(rate is not None)
        summed = () if decay is None else (decay,)
        if rate is None:
            # states and their gradients are FP32 here
            of_states = (sizes.states, first)
            states = _kernel(products(states=1), (k, v, decay, first), of_states, programs=programs)
            changes, of_first = _kernel(
                products(states=1), (q, of_read, decay, of_last), of_states, first, programs=programs
            )
            of_q, of_k, *of_decay = _kernel(
                products(states=2, keys=3, values=1), (q, k, v, decay, states, of_read, changes), q, k, *summed
            )
            of_v = _kernel(products(states=1, keys=1, values=1), (q, k, decay, of_read, changes), v)
            of_rate = None
        else:
            w, u = _kernel(products(keys=1, values=1), (k, v, rate, inverse, decay), k, v)
            before = (sizes.states, k)
            states, new = _kernel(products(states=2), (k, w, u, decay, first), before, v, programs=programs)
            of_new = _kernel(products(keys=1, values=1), (q, k, decay, of_read), v)
            changes, of_first, of_new = _kernel(
                products(states=3), (q, k, w, of_read, of_new, decay, of_last), before, first, v, programs=programs
            )
            of_q, of_k, of_w, *of_decay = _kernel(
                products(states=3, keys=3, values=1), (q, k, new, w, decay, states, of_read, of_new, changes),
                q, k, k, *summed,
            )  # fmt: skip
            more, of_v, of_rate, *more_of_decay = _kernel(
                products(keys=4, values=2, chunks=2),
                (k, v, rate, inverse, decay, of_w, of_new), k, v, rate, *summed,
            )  # fmt: skip
            of_k += more
            of_decay = [one + other for one, other in zip(of_decay, more_of_decay, strict=True)]
        of_decay = [_kernel(0.0, (each,), each) for each in of_decay]  # summed within chunks, from the end
        return of_q, of_k, of_v, *(of_decay or [None]), of_rate, of_first


def _inverse(sizes: _Sizes, k: Tensor, decay: Tensor | None, rate: Tensor) -> Tensor:
    """Return A [rows, tokens, heads, CHUNK], of k [rows, tokens, heads, keys] and gates [rows, tokens, heads].

    With a decay one kernel multiplies and solves; without, there are two, with the products in FP32 between them.
    """
    shape = (*k.shape[:-1], CHUNK)
    if decay is not None:
        return _kernel(sizes.products(keys=1, chunks=SOLVED), (k, decay, rate), (shape, k))
    overlaps = _kernel(sizes.products(keys=1), (k, rate), (shape, rate))
    return _kernel(sizes.products(chunks=SOLVED), (overlaps,), (shape, k))


def _simple_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, **rest: Any) -> tuple[Tensor, Tensor]:
    """See `_Recurrence` ([rows, tokens, heads, ...])."""
    return _Recurrence.apply(q, k, v, g, None, rest["initial_state"])


def _delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, **rest: Any) -> tuple[Tensor, Tensor]:
    """See `_Recurrence` ([rows, tokens, heads, ...])."""
    return _Recurrence.apply(q, k, v, None, beta, rest["initial_state"])


def _gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **rest: Any) -> tuple[Tensor, Tensor]:
    """See `_Recurrence` ([rows, tokens, heads, ...])."""
    return _Recurrence.apply(q, k, v, g, beta, rest["initial_state"])


PLANNED = Kernels(_simple_gla, _delta_rule, _gated_delta_rule)
"""What stands for the package's functions while a ledger watches."""
