"""The roofline: seconds that operations take on a device, from their arithmetic, their bytes and their number.

An operation takes as long as the slowest of three: its arithmetic at the rate that its kind reaches on the
multiprocessors that it uses, its bytes at the memory's rate, and the smallest kernel. Where programs share what one
could do alone, to use more multiprocessors, they take the time of the smallest kernel besides whenever they wait for
each other, and the time in which what each has found is written and added up. The host hands one operation after the
other to a device, which works on them meanwhile: a pass takes as long as the slower of the two.

    host     |launch|launch|launch|launch|
    device          |op    |op|   |op        |op|

A core is its own host and does one thing after the other: launch, bytes and arithmetic add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from typing_extensions import TypedDict

from megamem.config.base import ConfigModel
from megamem.ops.deep_memory.shared_heads import parts_for
from megamem.planning.operations import Kind, Operation

Floats = npt.NDArray[np.float64]


class MatmulRates(TypedDict):
    """FLOP/s of large matrix products, by dtype."""

    bf16: PositiveFloat
    fp32: PositiveFloat
    tf32: PositiveFloat
    """FLOP/s of small products inside a kernel of our own, of FP32 numbers with 10 bits of their mantissas."""


class Rates(ConfigModel):
    """What programs reach on a device. See devices.yaml."""

    matmul: MatmulRates
    """FLOP/s of large matrix products, by dtype."""
    attention: PositiveFloat
    """FLOP/s of a fused attention kernel's forward pass."""
    attention_backward: PositiveFloat
    """FLOP/s of its backward pass, and of kernels of our own whose products in BF16 are of blocks of the same sizes."""
    memory: PositiveFloat
    """Bytes per second that operations read and write."""
    functions: PositiveFloat | None = None
    """Exponentials and the like per second that a core computes, besides their bytes; None: as many as bytes move."""
    half_rate_side: NonNegativeFloat = 0.0
    """Rows and columns of square FP32 matrices whose product reaches half the rate of large ones, besides its bytes."""
    kernel: NonNegativeFloat
    """Seconds of the smallest operation on the device."""
    launch: NonNegativeFloat
    """Seconds of host time that an operation takes."""
    view: NonNegativeFloat = 0.0
    """Seconds of host time that a view takes; 0: `launch` has a share of them."""
    multiprocessors: PositiveInt = 1
    """How many the device has. A kernel of fewer programs leaves the others idle."""
    ahead: bool = True
    """Whether the host runs ahead of the device. Where it computes itself, launch, bytes and arithmetic add up."""

    def flops(self) -> Floats:
        """Return the FLOP/s of each kind of operation, in the order of `Kind`."""
        rates = {
            Kind.ELEMENTWISE: np.inf,
            Kind.MATMUL_FP32: self.matmul["fp32"],
            Kind.MATMUL_BF16: self.matmul["bf16"],
            Kind.MATMUL_TF32: self.matmul["tf32"],
            Kind.MATMUL_BF16_BLOCKS: self.attention_backward,
            Kind.ATTENTION: self.attention,
            Kind.ATTENTION_BACKWARD: self.attention_backward,
        }
        return np.array([rates[kind] for kind in Kind])

    def busy(self, programs: Floats) -> Floats:
        """Return the share of the multiprocessors that kernels of so many programs use, over all of their turns."""
        turns = np.maximum(1, np.ceil(programs / self.multiprocessors))
        return np.where(programs > 0, programs / (turns * self.multiprocessors), 1.0)

    def arithmetic(self, work: Work, programs: Floats) -> Floats:
        """Return the seconds of each operation's arithmetic, by kernels of so many programs."""
        reached = self.flops()[work.kinds] * self.busy(programs)
        # rows and columns of square matrices whose product has as much arithmetic
        small = (work.kinds == Kind.MATMUL_FP32) & (work.products > 0) & (work.flops > 0)
        side = np.where(small, np.cbrt(work.flops / 2 / np.where(small, work.products, 1.0)), np.inf)
        return work.flops / reached * (1 + self.half_rate_side / side)

    def parts(self, programs: Floats, divisible: Floats) -> Floats:
        """Return how many programs share what each of so many could do alone."""
        found = np.ones_like(programs)
        for at in np.flatnonzero(divisible > 1):
            found[at] = parts_for(round(programs[at]), round(divisible[at]), self.multiprocessors)
        return found


class Work(NamedTuple):
    """The operations of a pass, one number for each."""

    kinds: npt.NDArray[np.int8]
    """See `Kind`."""
    flops: Floats
    moved: Floats
    """Bytes read and written."""
    programs: Floats
    """See `Operation`."""
    divisible: Floats
    """See `Operation`; so the following ones."""
    meetings: Floats
    terms: Floats
    products: Floats
    functions: Floats
    views: Floats

    @classmethod
    def of(cls, operations: Sequence[Operation]) -> Work:
        """Return operations as numbers."""
        kinds = np.array([operation.kind for operation in operations], dtype=np.int8)
        others = len(Operation._fields) - 2
        numbers = [(each.flops, sum(each.moved), *each[3:]) for each in operations]
        return cls(kinds, *np.array(numbers, dtype=np.float64).reshape(-1, others + 1).T)

    def part(self, begin: int, end: int | None = None) -> Work:
        """Return the operations from one to before another, or to the last."""
        return Work(self.kinds[begin:end], *(each[begin:end] for each in self[1:]))

    def then(self, other: Work) -> Work:
        """Return these operations and others after them."""
        kinds = np.concatenate([self.kinds, other.kinds])
        return Work(kinds, *map(np.concatenate, zip(self[1:], other[1:], strict=True)))


@dataclass(frozen=True)
class PassTime:
    """Seconds of operations, by what they wait for."""

    products: float = 0.0
    """Arithmetic of matrix products."""
    attention: float = 0.0
    """Arithmetic of attention kernels."""
    memory: float = 0.0
    """Bytes that move, and functions of the numbers that do."""
    launches: float = 0.0
    """Operations too small for the device, and the host that is slower than it."""

    @property
    def total(self) -> float:
        """Seconds of all."""
        return self.products + self.attention + self.memory + self.launches

    def __add__(self, other: PassTime) -> PassTime:
        """Return the time of both, one after the other."""
        return PassTime(
            self.products + other.products,
            self.attention + other.attention,
            self.memory + other.memory,
            self.launches + other.launches,
        )

    def __mul__(self, times: float) -> PassTime:
        """Return the time of so many of them."""
        return PassTime(times * self.products, times * self.attention, times * self.memory, times * self.launches)


def pass_time(work: Work, rates: Rates) -> PassTime:
    """Return the time of a pass by the roofline."""
    parts = rates.parts(work.programs, work.divisible)
    arithmetic = rates.arithmetic(work, work.programs * parts)
    # terms are written by each part, and read and written as they are added up, where one alone would write its results
    shared = parts > 1
    moving = (work.moved + np.where(shared, 2 * parts * work.terms, 0.0)) / rates.memory
    host = rates.launch * len(arithmetic) + rates.view * float(work.views.sum())
    attends = work.kinds >= Kind.ATTENTION
    multiplies = (work.kinds > Kind.ELEMENTWISE) & ~attends
    if not rates.ahead:
        return PassTime(
            products=float(arithmetic[multiplies].sum()),
            attention=float(arithmetic[attends].sum()),
            memory=float(moving.sum() + work.functions.sum() / (rates.functions or np.inf)),
            launches=host,
        )
    seconds = np.maximum(np.maximum(arithmetic, moving), rates.kernel)
    # each operation's seconds go to what it waits for
    small = (arithmetic < rates.kernel) & (moving < rates.kernel)
    computes = ~small & (arithmetic >= moving)
    products, attention = float(seconds[computes & multiplies].sum()), float(seconds[computes & attends].sum())
    memory, launches = float(seconds[~small & ~(computes & (multiplies | attends))].sum()), float(seconds[small].sum())
    launches += rates.kernel * float(work.meetings[shared].sum())
    device = products + attention + memory + launches
    return PassTime(products, attention, memory, launches + max(0.0, host - device))
