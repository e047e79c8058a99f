"""Measurements of links: every pair of ranks exchanges tensors, and all of them reduce some."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megamem.preflight.meeting import LateError, Meeting, within
from megamem.preflight.records import Link, Reduction

TRIPS, LARGE_TRIPS = 10, 3
"""Numbers of round trips of a number and of a large tensor; the fastest counts, so that a busy moment does not."""
PAIR_BYTES = {"cpu": 2 * 2**20, "cuda": 16 * 2**20}
"""Bytes of the large tensor."""
REDUCED_BYTES = {"cpu": (2**16, 2**20, 16 * 2**20), "cuda": (2**20, 2**24, 2**28)}
"""Bytes of the tensors that all ranks reduce."""
HANGS = {"cpu": 2, "cuda": 1}
"""Number of failed pairs after which a rank is left out of later rounds: each costs the whole time limit, and and
an operation that hangs on a CUDA device keeps it from others, so that the next pair would be blamed for the last."""
SETUP_S = {"cpu": 0.0, "cuda": 30.0}
"""Seconds beyond the time limit for the connections that NCCL makes when ranks first talk."""


def rounds(world: int) -> list[dict[int, int]]:
    """Return rounds of disjoint pairs, each rank's partner by rank, in which every pair meets once.

    With an odd number of ranks one rests in each round.
    """
    # the circle method of tournaments: one seat is fixed, the others move on by one each round
    seats = list(range(world)) + [-1] * (world % 2)
    found = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        found.append({x: y for a, b in pairs if -1 not in (a, b) for x, y in ((a, b), (b, a))})
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found


def measure_links(meeting: Meeting, device: torch.device, limit_s: float) -> list[Link]:
    """Return every pair's link, on every rank. A pair that takes longer than `limit_s` is left with an error."""
    found: list[Link] = []
    world = len(meeting.present)
    for partners in rounds(world):
        partner = partners.get(meeting.rank)
        mine = None
        if partner is not None and not {partner, meeting.rank} & hanging(found, HANGS[device.type]):
            mine = _measure(meeting.rank, partner, device, limit_s)
        reports = meeting.gather(mine.model_dump() if mine is not None else None, limit_s + 10)
        sides = {rank: Link.model_validate(link) for rank, link in reports.items() if link is not None}
        found += merged(sides, partners)
        if len(meeting.present) < world:
            break
    return found


def _measure(rank: int, partner: int, device: torch.device, limit_s: float) -> Link:
    """Return the link to a partner as this rank sees it."""
    a, b = sorted((rank, partner))
    try:
        return within(limit_s, lambda: exchange(rank, partner, device))
    except LateError as late:
        return Link(a=a, b=b, error=f"send/recv {late}")
    except Exception as error:  # torch and the backends raise what they like
        return Link(a=a, b=b, error=f"send/recv fails: {' '.join(str(error).split())[:200]}")


def merged(reports: Mapping[int, Link], partners: Mapping[int, int]) -> list[Link]:
    """Return one link for each pair from the reports of both ranks.

    It has the figures of the lower rank, or the error if either rank reports one.
    """
    found = []
    for a, b in partners.items():
        if a < b:
            sides = [reports[rank] for rank in (a, b) if rank in reports]
            if wrong := [side for side in sides if side.error]:
                found.append(wrong[0])
            elif a in reports:
                found.append(reports[a])
    return found


def hanging(links: Sequence[Link], hangs: int) -> set[int]:
    """Return the ranks of which `hangs` pairs or more failed."""
    wrong = [rank for link in links if link.error for rank in (link.a, link.b)]
    return {rank for rank in wrong if wrong.count(rank) >= hangs}


def exchange(rank: int, partner: int, device: torch.device) -> Link:
    """Exchange tensors with a partner, which calls the same, and return the link; the lower rank has the figures.

    Raises: RuntimeError if something else arrives than was sent.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)  # the current device is a thread's own
    first = rank < partner
    clock, error = _clocks(partner, first)
    small, large = (
        [_round_trip(rank, partner, elements, device) for _ in range(trips)]
        for elements, trips in ((1, TRIPS), (PAIR_BYTES[device.type] // 4, LARGE_TRIPS))
    )
    a, b = sorted((rank, partner))
    return Link(
        a=a,
        b=b,
        latency_s=min(small) / 2,
        bandwidth=2 * PAIR_BYTES[device.type] / min(large),
        clock_s=clock,
        clock_error_s=error,
    )


def _clocks(partner: int, first: bool) -> tuple[float, float]:
    """Return the partner's clock less this rank's, and its uncertainty, in seconds, from the fastest round trip."""
    found = (0.0, math.inf)
    theirs = torch.zeros(1, dtype=torch.float64)
    for _ in range(TRIPS):
        if not first:
            dist.recv(theirs, src=partner)
            dist.send(torch.tensor([time.time()], dtype=torch.float64), dst=partner)
            continue
        begun = time.time()
        dist.send(theirs, dst=partner)
        dist.recv(theirs, src=partner)
        ended = time.time()
        found = min(found, (theirs.item() - (begun + ended) / 2, (ended - begun) / 2), key=lambda read: read[1])
    return found if first else (0.0, 0.0)


def _round_trip(rank: int, partner: int, elements: int, device: torch.device) -> float:
    """Return the seconds for a tensor there and one back. Raises RuntimeError for wrong values."""
    mine = torch.full((elements,), float(rank), device=device)
    theirs = torch.full((elements,), -1.0, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begun = time.perf_counter()
    if rank < partner:
        dist.send(mine, dst=partner)
        dist.recv(theirs, src=partner)
    else:
        dist.recv(theirs, src=partner)
        dist.send(mine, dst=partner)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - begun
    if not bool((theirs == partner).all()):
        raise RuntimeError("something else arrived than was sent")
    return seconds


def measure_reductions(world: int, device: torch.device, limit_s: float) -> list[Reduction]:
    """Measure all-reduces of some sizes over all ranks, which must call this together.

    Raises: LateError if one does not end in time; RuntimeError for a wrong sum.
    """
    return [within(limit_s, partial(_reduce, size, world, device)) for size in REDUCED_BYTES[device.type]]


def _reduce(size: int, world: int, device: torch.device) -> Reduction:
    """Measure an all-reduce of `size` bytes: the median of some, after one that is not counted."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    times = []
    for _ in range(LARGE_TRIPS + 1):
        tensor = torch.ones(size // 4, device=device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begun = time.perf_counter()
        dist.all_reduce(tensor)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begun)
        _check(tensor, world)
    seconds = statistics.median(times[1:])
    return Reduction(bytes=size, seconds=seconds, bandwidth=2 * (world - 1) / world * size / seconds)


def _check(tensor: Tensor, world: int) -> None:
    """Raise RuntimeError unless each entry of `tensor` [N], a sum of ones, is the number of ranks."""
    if not bool((tensor == world).all()):
        raise RuntimeError("an all-reduce gives a wrong sum")
