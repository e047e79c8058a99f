"""The kernels of deep memories in the eyes of a ledger: what each computes and moves, with torch's results.

A kernel does the arithmetic of torch's products, of blocks that are filled up to powers of two. What it is given and
what it returns goes through the device's memory once; what it reads again lies in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor

from megamem.ops.deep_memory import kept_networks
from megamem.ops.deep_memory.group_backward import TORCH, GroupPasses, ReadGradients, Reads, WriteGradients
from megamem.ops.deep_memory.group_forward import OF_QUERIES, Network, Shares, Tokens, Written
from megamem.ops.deep_memory.kept_networks import PROGRAM_ROWS, KeptPasses
from megamem.ops.deep_memory.network import Precision, Weights
from megamem.ops.deep_memory.pointwise import Pointwise
from megamem.ops.deep_memory.selected_networks import Lists, Pairs, SelectedPasses
from megamem.ops.deep_memory.shared_heads import UNITS
from megamem.planning.ledger import joined_as
from megamem.planning.operations import Kind, Operation, touched
from megamem.planning.tensors import tensors_in

PRODUCTS = {"tf32": (Kind.MATMUL_TF32, 1), "tf32x3": (Kind.MATMUL_TF32, 3), "ieee": (Kind.MATMUL_FP32, 1)}
"""How FP32 numbers are multiplied: by which unit, and how many products stand for one."""


def planned_passes(precision: Precision) -> GroupPasses:
    """Return both passes of a group of inner chunks by torch, as one kernel each in the eyes of a ledger."""
    kind, products = PRODUCTS[precision]

    def as_kernel(
        blocks: Tensor, units: int, read: object, function: Callable[..., Any], *given: object,
        terms: Callable[..., object] = lambda out: (),
    ) -> Any:  # fmt: skip
        """Return what a function returns that a kernel computes.

        blocks: [B, H, N, T, D], filled up; a program is for each of them, or where there are inner `units` to share,
        for all N, and for some of the units. read: what the kernel reads; terms: results of which it writes terms.
        """
        filled = products * math.prod(2 ** (size - 1).bit_length() / size for size in blocks.shape[-2:])

        def kernel(steps: Sequence[Operation], out: object) -> Operation:
            """Return the kernel that does the work of these steps."""
            flops, moved = filled * sum(step.flops for step in steps), bytes_moved(read, out)
            if not units:
                return Operation(kind, flops, moved, math.prod(blocks.shape[:3]))
            heads, divisible = math.prod(blocks.shape[:2]), math.ceil(units / UNITS)
            return Operation(kind, flops, moved, heads, divisible, blocks.shape[2], sum(bytes_moved(terms(out))))

        return joined_as(kernel, function, *given)

    def write(
        network: Network, tokens: Tokens, shares: Shares, weight: Tensor | None, first: Weights, momentum: Weights
    ) -> tuple[Written, Weights, Weights]:
        """See `write` [B, H, ...]."""
        read = tokens.value, shares[OF_QUERIES:], weight, first, momentum
        given = network, tokens, shares, weight, first, momentum
        units = first[0].shape[-2]
        return cast("tuple[Written, Weights, Weights]", as_kernel(tokens.key, units, read, TORCH.write, *given))

    def read(network: Network, query: Tensor, shares: Shares, written: Written) -> Tensor:
        """See `read` [B, H, ...]."""
        moved = query, shares[:OF_QUERIES], _of_reads(written)
        given = network, query, shares, written
        return cast(Tensor, as_kernel(_blocks(query, written), 0, moved, TORCH.read, *given))

    def through_reads(
        network: Network, query: Tensor, shares: Shares, weight: Tensor | None, written: Written,
        answered: Tensor | None, out: Tensor,
    ) -> ReadGradients:  # fmt: skip
        """See `through_reads` [B, H, ...]."""
        norm, of_weight = network.norm(weight), None
        if norm is not None and answered is not None:
            out, of_weight = network.pointwise.norm_gradients(out, answered, norm)
        moved = query, shares[:OF_QUERIES], _of_reads(written), out
        given = network._replace(eps=None), query, shares, None, written, None, out
        found = as_kernel(_blocks(query, written), 0, moved, TORCH.through_reads, *given)
        return cast(ReadGradients, found._replace(weight=of_weight))

    def through_writes(
        network: Network, tokens: Tokens, shares: Shares, weight: Tensor | None, written: Written,
        reads: Sequence[Reads], of_weights: Weights, of_momentum: Weights,
    ) -> WriteGradients:  # fmt: skip
        """See `through_writes` [B, H, ...]."""
        read = tokens.value, shares[OF_QUERIES:], weight, written, reads, of_weights, of_momentum
        given = network, tokens, shares, weight, written, reads, of_weights, of_momentum
        units = of_weights[0].shape[-2]

        def by_parts(out: WriteGradients) -> object:
            """Return the gradients to which each part of a head's inner units adds."""
            return out.key, out.shares

        found = as_kernel(tokens.key, units, read, TORCH.through_writes, *given, terms=by_parts)
        return cast(WriteGradients, found)

    return GroupPasses(write, read, through_reads, through_writes)


def planned_kept_passes(precision: Precision) -> KeptPasses:
    """Return both passes of kept networks by torch, as one kernel forward and two backward in the eyes of a ledger."""

    def kernel(
        rows: Tensor, reading: Sequence[slice], products: int, programs: float, read: object, written: object
    ) -> Operation:
        """Return a kernel of so many products of each pair of a row and a network with a matrix.

        rows: [B, H, R, D], read by networks in blocks; read, written: what goes through the device's memory.
        """
        kind, times = (Kind.MATMUL_BF16_BLOCKS, 1) if rows.dtype == torch.bfloat16 else PRODUCTS[precision]
        bytes_ = bytes_moved(read) + bytes_moved(written)
        return Operation(kind, float(times * products * _pairs(rows, reading)), bytes_, programs)

    def answer(
        rows: Tensor, shares: Tensor, eps: float | None, reading: Sequence[slice], pointwise: Pointwise,
        matrices: Sequence[Tensor],
    ) -> Tensor:  # fmt: skip
        """See `answer` of `kept_networks.py` [B, H, ...]."""
        rows, shares, *matrices = _contiguous(rows, shares, *matrices)
        heads, inner = rows.shape[:2].numel(), matrices[0].shape[-2]
        programs = heads * math.ceil(rows.shape[2] / PROGRAM_ROWS[rows.itemsize])

        def as_one(steps: Sequence[Operation], out: Tensor) -> Operation:
            """Return the kernel: U q, and what V makes of it."""
            return kernel(rows, reading, 2 * inner, programs, (rows, shares, matrices), out)

        return joined_as(as_one, kept_networks.TORCH.answer, rows, shares, eps, reading, pointwise, matrices)

    def gradients(
        of_total: Tensor, rows: Tensor, shares: Tensor, eps: float | None, reading: Sequence[slice],
        pointwise: Pointwise, matrices: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
        """See `gradients` of `kept_networks.py` [B, H, ...]."""
        rows, shares, *matrices = _contiguous(rows, shares, *matrices)
        heads, (count, inner) = rows.shape[:2].numel(), matrices[0].shape[2:4]
        programs, networks = (
            heads * math.ceil(rows.shape[2] / PROGRAM_ROWS[rows.itemsize]),
            heads * count * math.ceil(inner / 64),
        )
        # what the first kernel leaves for the second
        of_made = rows.new_empty(*rows.shape[:2], count, *rows.shape[2:])

        def through_rows(steps: Sequence[Operation], out: tuple[Tensor, Tensor, list[Tensor]]) -> Operation:
            """Return the kernel of rows: m anew, z again, V _m and U^T _z."""
            written = rows, out[1], of_made
            return kernel(rows, reading, 5 * inner, programs, (of_total, rows, shares, matrices), written)

        def through_matrices(steps: Sequence[Operation], out: None) -> Operation:
            """Return the kernel of matrices: z once more, V _m, _V and _U."""
            return kernel(rows, reading, 4 * inner, networks, (rows, of_made, matrices), matrices)

        given = of_total, rows, shares, eps, reading, pointwise, matrices
        _, of_shares, of_matrices = joined_as(through_rows, kept_networks.TORCH.gradients, *given)
        joined_as(through_matrices, lambda: None)
        return torch.empty_like(rows), of_shares, of_matrices

    return KeptPasses(answer, gradients)


def planned_selected_passes(precision: Precision) -> SelectedPasses:
    """Return both passes of selected networks, which compute nothing: for each list one kernel forward, two back."""

    def kernel(
        rows: Tensor, pairs: Pairs, matrices: Sequence[Tensor], products: int, read: Sequence[object], written: object
    ) -> Operation:
        """Return a kernel of so many products of each pair with a matrix; a network's last block is half full.

        A list is taken to have its share of the pairs. rows: [B, H, R, D]; matrices: of its networks; read: what goes
        through the device's memory, each, besides the pairs and the matrices; written: what is made.
        """
        kind, times = (Kind.MATMUL_BF16_BLOCKS, 1) if rows.dtype == torch.bfloat16 else PRODUCTS[precision]
        here, inner = matrices[0].shape[2:4]
        share, block = here / (pairs.begins.shape[-1] - 1), PROGRAM_ROWS[rows.itemsize]
        filled = pairs.order.numel() * share + rows.shape[:2].numel() * here * block / 2
        flops = 2.0 * times * products * inner * filled * 2 ** (rows.shape[-1] - 1).bit_length()
        of_pairs = (*chain.from_iterable(map(bytes_moved, read)), *bytes_moved(written, pairs))
        moved = (*(share * each for each in of_pairs), *bytes_moved(matrices))
        return Operation(kind, flops, moved, max(1.0, filled / block))

    def answer(rows: Tensor, shares: Tensor, pairs: Pairs, eps: float | None, lists: Lists) -> Tensor:
        """See `SelectedPasses` [B, H, ...]."""
        rows, shares = _contiguous(rows, shares)
        parts = shares.new_zeros(_by_pair(rows, pairs))
        for matrices in lists:
            own = _contiguous(*matrices)

            def as_one(steps: Sequence[Operation], out: Tensor, own: list[Tensor] = own) -> Operation:
                """Return the kernel: U q, and what V makes of it, of gathered rows."""
                return kernel(rows, pairs, own, 2, (out, shares), out)

            joined_as(as_one, lambda: parts)
        return parts

    def gradients(
        of_total: Tensor, rows: Tensor, shares: Tensor, pairs: Pairs, eps: float | None, lists: Lists
    ) -> tuple[Tensor, Tensor, Lists]:
        """See `SelectedPasses` [B, H, ...]."""
        rows, shares = _contiguous(rows, shares)
        of_parts, of_made, found = rows.new_zeros(_by_pair(rows, pairs)), rows.new_empty(_by_pair(rows, pairs)), []
        for matrices in lists:
            own = _contiguous(*matrices)

            def of_rows(steps: Sequence[Operation], out: Tensor, own: list[Tensor] = own) -> Operation:
                """Return the kernel of pairs: m anew, z again, V _m and U^T _z, of gathered rows and gradients."""
                return kernel(rows, pairs, own, 5, (out, out, shares), (out, of_made, shares))

            def of_matrices(steps: Sequence[Operation], out: list[Tensor], own: list[Tensor] = own) -> Operation:
                """Return the kernel of matrices: z once more, V _m, _V and _U."""
                networks = rows.shape[:2].numel() * own[0].shape[2]
                found = kernel(rows, pairs, own, 4, (of_made, of_made), ())
                return found._replace(
                    moved=found.moved + bytes_moved(out), programs=networks * math.ceil(own[0].shape[3] / 64)
                )  # fmt: skip

            joined_as(of_rows, lambda: of_parts)
            found.append(joined_as(of_matrices, lambda own: [torch.empty_like(x) for x in own], own))
        return of_parts, torch.zeros_like(shares), found

    return SelectedPasses(answer, gradients)


def _contiguous(*given: Tensor) -> list[Tensor]:
    """Return tensors [...] in the order of their memory, as the kernels take them: others are copied."""
    return [x.contiguous() for x in given]


def _by_pair(rows: Tensor, pairs: Pairs) -> tuple[int, ...]:
    """Return the shape of vectors of each row's pairs, [B, H, R, K, D], for rows [B, H, R, D]."""
    return *rows.shape[:3], pairs.order.shape[-1] // rows.shape[2], rows.shape[-1]


def _pairs(rows: Tensor, reading: Sequence[slice]) -> float:
    """Return the FLOPs of a product of a vector for each inner unit, of all pairs of rows [B, H, R, D] and networks.

    Blocks of rows are whole, and channels are filled up to a power of two.
    """
    blocks, size = 0, PROGRAM_ROWS[rows.itemsize]
    for each in reading:
        begin, end, _ = each.indices(rows.shape[2])
        blocks += max(0, math.ceil(end / size) - begin // size) if begin < end else 0
    return 2.0 * rows.shape[:2].numel() * blocks * size * 2 ** (rows.shape[-1] - 1).bit_length()


def bytes_moved(*of: object) -> tuple[float, ...]:
    """Return the bytes of each tensor in some values, once."""
    return tuple({id(x): touched(x) for x in tensors_in(of)}.values())


def _of_reads(written: Written) -> object:
    """Return what reads need of what has been written."""
    return written.weights, written.momentum, written.changes, written.inputs


def _blocks(query: Tensor, written: Written) -> Tensor:
    """Return queries [B, H, N, G T, D] by the heads that ask, [B, H, N G, T, D]."""
    return query.unflatten(3, (-1, written.inputs[0].shape[-2])).flatten(2, 3)
