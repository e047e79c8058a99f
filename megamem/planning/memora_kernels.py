"""The kernels of Memora's networks in the eyes of a ledger: what each computes and moves, with results of zeros.

As in `deep_memory_kernels.py`: arithmetic of blocks that are filled up to powers of two; what a kernel is given and
what it returns goes through the device's memory once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megamem.ops.deep_memory.network import Precision
from megamem.ops.deep_memory.simplex import ReadGroup, SimplexNetwork, group_of_rows
from megamem.planning.deep_memory_kernels import PRODUCTS, bytes_moved
from megamem.planning.ledger import joined_as
from megamem.planning.operations import Operation

WRITE, THROUGH_WRITES = 5, 10
"""Products T D I of an inner chunk without decays: z, W1 h, W1^T r and both outer products to write; back through that
two and three through the logarithms, five through z and the weights."""
WRITE_SHIFTS, THROUGH_WRITES_SHIFTS = 3, 9
"""Those that decays need besides, which change the sums of the first matrix's rows."""
READ, THROUGH_READS = 2, 5
"""To read, one with each matrix; back through that z anew, and two with each but for W1 h."""


def planned_read_group(precision: Precision) -> ReadGroup:
    """Return `read_group` of `simplex.py` as four kernels in the eyes of a ledger."""
    return partial(group_of_rows, partial(_Group.apply, precision))


class _Group(torch.autograd.Function):
    """A group of inner chunks as `triton/launch_simplex.py` computes it."""

    @staticmethod
    def forward(ctx: Any, precision: Precision, network: SimplexNetwork, *given: Tensor | None) -> tuple[Tensor, ...]:
        """Return y [B, H, N, T, D] and L after the last inner chunk; given: as in `simplex_group.py`."""
        ctx.precision, ctx.network = precision, network
        ctx.save_for_backward(*given)
        kernels = _Kernels(precision, given)
        written, last = kernels.write()
        query, (answered, *_) = kernels.query, kernels.read(written)
        made = answered if network.norm is None else network.norm(answered)
        return query + made if network.residual else made, *last

    @staticmethod
    def backward(ctx: Any, of_read: Tensor, *of_last: Tensor) -> tuple[Tensor | None, ...]:
        """Return gradients of the inputs [B, H, ...]."""
        network, kernels = ctx.network, _Kernels(ctx.precision, ctx.saved_tensors)
        written, _ = kernels.write()
        answered, *others = kernels.read(written)
        out, of_weight = of_read, None
        if network.norm is not None:
            out, of_weight = network.pointwise.norm_gradients(of_read, answered, network.norm)
        reads = kernels.through_reads(written, others, out)
        found = kernels.through_writes(written, reads, of_last)
        of_query = of_read + reads[0] if network.residual else reads[0]
        return None, None, of_query, *found[:-2], of_weight, *found[-2:]


class _Kernels:
    """The kernels of one group, by what each computes and moves."""

    def __init__(self, precision: Precision, given: Sequence[Any]) -> None:
        """Begin with what a group is given, [B, H, ...]."""
        self.query, *self._tokens, _, up, down = given
        self._logs = up, down
        self._kind, self._times = PRODUCTS[precision]
        self._shape = rows, heads, count, tokens, width = self.query.shape
        self._heads, self._count, self._inner = rows * heads, count, up.shape[-2]
        self._filled = math.prod(2 ** (size - 1).bit_length() / size for size in (tokens, width))
        self._shifting = self._tokens[3] is not None

    def _run(self, products: int, among: int, programs: int, read: object, made: list[Tensor]) -> list[Tensor]:
        """Enter a kernel of products T D I and products T T of so many vectors, by inner chunk.

        read: what goes through the device's memory; made: its results, [B, H, ...], which are returned.
        """
        tokens, width = self._shape[-2:]
        flops = 2.0 * tokens * (products * width * self._inner + among * tokens) * self._heads * self._count

        def kernel(steps: Sequence[Operation], out: object) -> Operation:
            """Return the kernel that makes the results."""
            return Operation(self._kind, self._times * self._filled * flops, bytes_moved(read, made), programs)

        joined_as(kernel, lambda: None)
        return made

    def _room(self, *of: Any) -> list[Any]:
        """Return room like tensors [...]; None stays None."""
        return [None if x is None else torch.empty_like(x) for x in of]

    def write(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the logarithms as inner chunks start, what is as wide as them and as heads; those after the group."""
        series = [x.new_empty(*x.shape[:2], self._count, *x.shape[2:]) for x in self._logs]
        wide = [self.query.new_empty(*self._shape[:-1], self._inner) for _ in range(4)]
        made = [*series, *wide, *self._room(self.query, self.query)]
        last = self._room(*self._logs)
        products = WRITE + WRITE_SHIFTS * self._shifting
        self._run(products, 0, self._heads, (self._tokens, self._logs), [*made, *last])
        return made, last

    def read(self, written: list[Tensor]) -> list[Tensor]:
        """Return what queries are answered, a part of it, and sums of rows.

        written: as `write` returns it, [B, H, ...].
        """
        made = [*self._room(self.query, self.query), self.query.new_empty(*self._shape[:3], self._shape[-1])]
        up, down, _, active, _, change, _, wrong = written
        read = self.query, self._tokens[0], self._tokens[2], up, down, active, change, wrong
        return self._run(READ, 2 * (self._shape[-1] + self._inner), self._heads * self._count, read, made)

    def through_reads(self, written: list[Tensor], others: list[Tensor], out: Tensor) -> list[Tensor]:
        """Return the gradients of queries, keys, r and rates, d, h and the logarithms, through the reads.

        written: as `write` returns it, [B, H, ...]; others: of what `read` returns; out: the gradient of that.
        """
        up, down, _, active, _, change, _, wrong = written
        made = self._room(self.query, self.query, wrong, self.query, change, active, up, down)
        read = self.query, self._tokens[0], self._tokens[2], up, down, active, change, wrong, others, out
        among = 5 * self._shape[-1] + 6 * self._inner
        return self._run(THROUGH_READS, among, self._heads * self._count, read, made)

    def through_writes(self, written: list[Tensor], reads: list[Tensor], of_last: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of the tokens' fields and of L as the group starts.

        written, reads: as `write` and `through_reads` return them, [B, H, ...]; of_last: of L after the group.
        """
        products = THROUGH_WRITES + THROUGH_WRITES_SHIFTS * self._shifting
        made = self._room(*self._tokens, *self._logs)
        found = [x for x in made if x is not None]
        self._run(products, 0, self._heads, (self._tokens, written, reads[1:], of_last), found)
        return made
