"""Plays a schedule through: when every action starts and ends, how long stages idle, what they hold. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megamem.pipeline.schedule import Action, Order

Cost = Callable[[int, Action], float]
"""Time of an action on a stage."""
BACKWARD_COST = 2.0
"""A backward computes two gradients for each product of the forward."""


class DeadlockError(ValueError):
    """The orders of a schedule can never all be carried out."""


@dataclass(frozen=True)
class Event:
    """An action as it ran."""

    stage: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A schedule as it ran, simulated or recorded."""

    stages: int
    events: tuple[Event, ...]

    @property
    def makespan(self) -> float:
        """Return the time from the first start to the last end."""
        return max(event.end for event in self.events) - min(event.start for event in self.events)

    def busy(self, stage: int) -> float:
        """Time `stage` works."""
        return sum(event.end - event.start for event in self.events if event.stage == stage)

    @property
    def bubble(self) -> float:
        """Idle time over working time, of all stages together: what an uneven placement loses is in it."""
        busy = sum(event.end - event.start for event in self.events)
        return (self.stages * self.makespan - busy) / busy

    def peak_units(self, stage: int) -> int:
        """Most units between the start of their forward and the end of their backward at any time."""
        live = peak = 0
        # a stage does one thing after the other: a unit is freed when its backward ends, before the next start
        for event in sorted((e for e in self.events if e.stage == stage), key=lambda e: (e.end, e.start)):
            if event.action.kind == "forward":
                live += 1
                peak = max(peak, live)
            else:
                live -= 1
        return peak

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return {
            "stages": self.stages,
            "events": [
                [e.stage, e.action.kind, e.action.micro_batch, e.action.chunk, e.start, e.end] for e in self.events
            ],
        }

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Timeline:
        """Return the timeline that `to_dict` described."""
        events = (Event(stage, Action(*what), start, end) for stage, *what, start, end in data["events"])
        return Timeline(data["stages"], tuple(events))


def even_cost(forward: float = 1.0, backward: float = BACKWARD_COST) -> Cost:
    """All units cost the same on all stages."""
    return lambda stage, action: forward if action.kind == "forward" else backward


def chunk_cost(forward: Sequence[float], backward: Sequence[float]) -> Cost:
    """Cost by the chunk's index in its sequence: attention to all that came before, memories that grow."""
    return lambda stage, action: (forward if action.kind == "forward" else backward)[action.chunk]


def simulate(
    orders: Sequence[Order],
    bptt_chunks: int,
    cost: Cost | None = None,
    transfer: float = 0.0,
    last_to_first: bool = False,
) -> Timeline:
    """Run every stage's order as early as possible.

    Args:
        orders: what each stage does.
        bptt_chunks: chunks of a window: a backward needs those of the later chunks in its window.
        cost: time of an action; units of 1 forward and 2 backward if not given.
        transfer: time between an action's end and its result's arrival on the next stage.
        last_to_first: whether a memory leaves the last stage and enters the first one before the next chunk.
    Raises: DeadlockError naming what each stage waits for if the orders cannot all be carried out.
    """
    cost = cost or even_cost()
    last = len(orders) - 1
    ended: dict[tuple[int, Action], float] = {}
    events: list[Event] = []
    position = [0] * len(orders)
    free = [0.0] * len(orders)
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            while position[stage] < len(order):
                action = order[position[stage]]
                ready = _ready(stage, last, action, bptt_chunks, ended, transfer, last_to_first)
                if ready is None:
                    break
                start = max(free[stage], ready)
                free[stage] = start + cost(stage, action)
                ended[stage, action] = free[stage]
                events.append(Event(stage, action, start, free[stage]))
                position[stage] += 1
                moved = True
    stuck = [
        f"stage {stage} at {order[position[stage]]}"
        for stage, order in enumerate(orders)
        if position[stage] < len(order)
    ]
    if stuck:
        raise DeadlockError(f"the schedule cannot be carried out: {', '.join(stuck)} wait for what never comes")
    return Timeline(len(orders), tuple(events))


def _ready(
    stage: int,
    last: int,
    action: Action,
    bptt_chunks: int,
    ended: dict[tuple[int, Action], float],
    transfer: float,
    last_to_first: bool,
) -> float | None:
    """When all that `action` needs is there; None if some of it has not run."""
    micro_batch, chunk = action.micro_batch, action.chunk
    needs: list[tuple[float, tuple[int, Action]]] = []
    if action.kind == "forward":
        if stage > 0:
            needs.append((transfer, (stage - 1, action)))
        if chunk > 0:  # the memory
            needs.append((0.0, (stage, Action("forward", micro_batch, chunk - 1))))
            if last_to_first and stage == 0:
                needs.append((transfer, (last, Action("forward", micro_batch, chunk - 1))))
    else:
        needs.append((0.0, (stage, Action("forward", micro_batch, chunk))))
        if stage < last:
            needs.append((transfer, (stage + 1, action)))
        if (chunk + 1) % bptt_chunks:  # the memory's gradient
            needs.append((0.0, (stage, Action("backward", micro_batch, chunk + 1))))
            if last_to_first and stage == last:
                needs.append((transfer, (0, Action("backward", micro_batch, chunk + 1))))
    if any(need not in ended for _, need in needs):
        return None
    return max((ended[need] + delay for delay, need in needs), default=0.0)
