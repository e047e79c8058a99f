"""Programs that share a head: each has a part of its inner units, and what all need of a sum over units they exchange.

The parts of a head meet once for each inner chunk. They have written their terms of the sum then, and each adds up the
terms of all. On a device all inner chunks are one launch and programs wait for each other inside it. Where programs run
one after the other, as in Triton's interpreter, what lies between two meetings is a launch of its own.

    part 0   |terms of 1|meet|changes by 1, terms of 2|meet|changes by 2, terms of 3|meet| ...
    part 1   |terms of 1|meet|changes by 1, terms of 2|meet|changes by 2, terms of 3|meet| ...
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from megamem.ops.deep_memory.triton.blocks import store_block


class Meeting(NamedTuple):
    """What the parts of all heads exchange."""

    terms: Tensor
    """[B H, 2, parts, T, D]: those of one inner chunk are read while those of the next are written."""
    started: Tensor | None
    """How many programs have started, [1], of 32 bits; None: a launch ends where programs would wait."""
    arrived: Tensor | None
    """How many have come to meetings, [B H], of 32 bits; zeros at first, as `started`."""


@triton.jit
def place(meeting, sizes):
    """Return the head of a row that a program is at work on, and which part of its inner units are the program's.

    Programs count off as they start. The parts of a head then start one after the other, and a program waits only for
    such as run already or are the next to start: none waits for ever, however few a device runs at a time.
    """
    program = tl.program_id(0)
    if meeting.started is not None:
        program = tl.atomic_add(meeting.started, 1)
    return (program // sizes.parts).to(tl.int64), program % sizes.parts


@triton.jit
def meet(meeting, row_head, times, sizes):
    """Wait until all parts of a head have come to so many meetings. What they wrote before can be read then."""
    # all threads have written what the others will read
    tl.debug_barrier()
    if meeting.arrived is not None:
        arrived = meeting.arrived + row_head
        tl.atomic_add(arrived, 1, sem="release")
        while tl.atomic_add(arrived, 0, sem="acquire") < times * sizes.parts:
            pass
        tl.debug_barrier()


@triton.jit
def store_terms(meeting, block, row_head, part, turn, tokens, channels, sizes):
    """Write a part's terms of a sum [T, D] for the meeting after `turn`."""
    place_of_part = (row_head * 2 + turn % 2) * sizes.parts + part
    to = meeting.terms + place_of_part * sizes.tokens * sizes.width
    store_block(to, block, tokens, channels, sizes.tokens, sizes.width)


@triton.jit
def sum_of_terms(meeting, row_head, turn, tokens, channels, sizes):
    """Return the sum [T, D] of what all parts have written in `turn`, in the order of the parts."""
    terms = meeting.terms + (row_head * 2 + turn % 2) * sizes.parts * sizes.tokens * sizes.width
    places = tokens[:, None] * sizes.width + channels[None, :]
    inside = (tokens < sizes.tokens)[:, None] & (channels < sizes.width)[None, :]
    # from the cache that multiprocessors share: their own may hold what was there two meetings ago
    total = tl.load(terms + places, mask=inside, other=0.0, cache_modifier=".cg")
    for part in range(1, sizes.parts):
        of_part = terms + part * sizes.tokens * sizes.width
        total += tl.load(of_part + places, mask=inside, other=0.0, cache_modifier=".cg")
    return total
