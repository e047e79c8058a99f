"""Programs: what the process of each stage issues, in order. Its actions, and the sends and receives between them.

A receive that is posted ahead of its use lets a tensor travel while the stage still works on another one. It must not
be posted too far ahead: on CUDA it runs on the device until its sender has sent, and whatever makes this process wait
for its whole device meanwhile waits for the sender too (`megamem.pipeline.hazards`). So programs are cut out of one
line of everything that happens on all stages, in which a receive stands where its send does. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from megamem.pipeline.schedule import Action, Order, chunk_schedule, forward_order, groups_of
from megamem.pipeline.simulate import Event, even_cost, simulate

POSTED = 2
"""Most receives of hidden chunks, and of gradients, that are posted and whose results nothing has used: those of the
present and of the next action."""

Channel = Literal["hidden chunk", "gradient", "memory", "gradient of the memory"]
"""What travels: each kind has a process group of its own."""

Leaves = Callable[[Action], bool]
"""Whether the memories that span the model leave the last stage for the first one after a forward."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """The way of one action's result from its stage to another."""

    channel: Channel
    action: Action
    """Whose result it is."""
    source: int
    """The stage that sends it."""
    target: int
    """The stage that receives it."""


@dataclass(frozen=True, slots=True)
class Send:
    """The start of a transfer, on its source."""

    transfer: Transfer

    def __str__(self) -> str:
        """Return it in words."""
        t = self.transfer
        return f"sending the {t.channel} of the {t.action} to stage {t.target}"


@dataclass(frozen=True, slots=True)
class Receive:
    """The posting of a transfer's receive, on its target."""

    transfer: Transfer

    def __str__(self) -> str:
        """Return it in words."""
        t = self.transfer
        return f"receiving the {t.channel} of the {t.action} from stage {t.source}"


Program = list[Action | Send | Receive]
"""What one stage issues, first to last."""


def transfer_after(stage: int, stages: int, action: Action, bptt_chunks: int, leaves: Leaves | None) -> Transfer | None:
    """Return what goes to another stage after an action of `stage`; None if nothing does.

    Args:
        stages: in the pipeline.
        bptt_chunks: chunks of a window; no gradient of a memory crosses its border.
        leaves: after which forwards memories leave the last stage; None: no memory spans the model.
    """
    last = stages - 1
    if action.kind == "forward":
        if stage < last:
            return Transfer("hidden chunk", action, stage, stage + 1)
        if last and leaves is not None and leaves(action):
            return Transfer("memory", action, last, 0)
    else:
        if stage > 0:
            return Transfer("gradient", action, stage, stage - 1)
        if last and leaves is not None and action.chunk % bptt_chunks:
            return Transfer("gradient of the memory", action, 0, last)
    return None


def programs(orders: Sequence[Order], bptt_chunks: int, leaves: Leaves | None = None) -> list[Program]:
    """Return the programs of all stages.

    The orders are played through with actions that all take the same time, and put in a line by their starts; of those
    that start together, forwards come first, from the first stage up, then backwards, from the last stage down. Every
    transfer stands right behind the action whose result it is, and a program is the part of the line that its stage
    takes part in. A receive is thus posted before the action that the stage runs while its sender works on the result.

    Args:
        orders: what each stage does.
        bptt_chunks: chunks of a window.
        leaves: see `transfer_after`.
    Raises: DeadlockError if the orders cannot all be carried out.
    """
    stages = len(orders)
    timeline = simulate(orders, bptt_chunks, even_cost(1.0, 1.0), last_to_first=leaves is not None)
    found: list[Program] = [[] for _ in orders]
    for event in sorted(timeline.events, key=_place):
        found[event.stage].append(event.action)
        transfer = transfer_after(event.stage, stages, event.action, bptt_chunks, leaves)
        if transfer is not None:
            found[transfer.source].append(Send(transfer))
            found[transfer.target].append(Receive(transfer))
    return found


def _place(event: Event) -> tuple[float, bool, int]:
    """Return by what events are put in a line; one that needs another's result begins later than it."""
    backward = event.action.kind == "backward"
    return event.start, backward, -event.stage if backward else event.stage


def training_programs(
    stages: int, micro_batches: int, chunks: int, bptt_chunks: int, interleaved: bool = False, keep: bool = False
) -> list[Program]:
    """Return the programs of all stages in one optimizer step (`megamem.pipeline.schedule.chunk_schedule`).

    interleaved: whether a memory goes from the last stage to the first. keep: whether the next step reads on, so that
    it does so after a micro-batch's last chunk too.
    """

    def leaves(action: Action) -> bool:
        return keep or action.chunk < chunks - 1

    orders = chunk_schedule(stages, micro_batches, chunks, bptt_chunks, interleaved)
    return programs(orders, bptt_chunks, leaves if interleaved else None)


def reading_programs(stages: int, calls: int, leaves: Leaves | None = None) -> list[Program]:
    """Return the programs of all stages that read `calls` chunks of one batch forward only.

    leaves: see `transfer_after`.
    """
    return programs([forward_order(groups_of(1, stages, interleaved=False), calls)] * stages, 1, leaves)
