"""What crosses a border between two stages: one floating tensor per unit and direction, in the order of the schedule.

Receives are posted where the stage's program says (`megamem.pipeline.program`), ahead of their use, and sends are left
to finish by themselves. Shapes are known to both sides from the schedule and never sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megamem.parallel.topology import Topology
from megamem.pipeline.program import Channel, Program, Receive
from megamem.pipeline.schedule import Action, Order

Shape = tuple[int, ...]


class Inbox:
    """Tensors from one neighbour, in order. Each is a buffer of its own: units keep them until their backward."""

    def __init__(
        self, group: ProcessGroup, source: int, shapes: Iterable[Shape], dtype: torch.dtype, device: torch.device
    ) -> None:
        """Expect tensors of `shapes`, all that will come, from group rank `source`."""
        self._group, self._source = group, source
        self._shapes: Iterator[Shape] = iter(shapes)
        self._dtype, self._device = dtype, device
        self._posted: deque[tuple[dist.Work, Tensor]] = deque()

    def post(self) -> None:
        """Post the next receive."""
        buffer = torch.empty(next(self._shapes), dtype=self._dtype, device=self._device)
        work = dist.irecv(buffer, group=self._group, group_src=self._source)
        assert work is not None
        self._posted.append((work, buffer))

    def take(self) -> Tensor:
        """Return the next tensor, whose receive is posted; waits for it (on CUDA, the stream waits)."""
        work, buffer = self._posted.popleft()
        work.wait()
        return buffer


class Outbox:
    """Tensors to one neighbour, in order."""

    def __init__(self, group: ProcessGroup, target: int, pending: int) -> None:
        """pending: sends that may be under way; the oldest is waited for when there are more."""
        self._group, self._target, self._pending = group, target, pending
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()

    def put(self, tensor: Tensor) -> None:
        """Send a copy-free view of `tensor` [...], which must not be written to any more."""
        tensor = tensor.detach().contiguous()
        work = dist.isend(tensor, group=self._group, group_dst=self._target)
        assert work is not None
        self._sent.append((work, tensor))
        while len(self._sent) > self._pending:
            self._sent.popleft()[0].wait()

    def flush(self) -> None:
        """Wait for all sends."""
        while self._sent:
            self._sent.popleft()[0].wait()


class Borders:
    """A stage's channels for one pass over a schedule; those that it does not need are None."""

    def __init__(
        self,
        topology: Topology,
        program: Program,
        shapes_below: Iterable[Shape],
        shapes_above: Iterable[Shape],
        dtype: torch.dtype,
        memories: Sequence[Shape] = (),
    ) -> None:
        """Open the channels and post the receives that come before the program's first action.

        Args:
            program: of this stage.
            shapes_below: of what comes from the stage below for each unit, in the order of their forwards.
            shapes_above: of what goes to the stage above, likewise; with backwards, all of a border are alike.
            dtype: of everything that is sent.
            memories: shapes of the tensors that leave the last stage and enter the first one after a unit.
        """
        stage, stages, device = topology.pp_rank, topology.pp_size, topology.device
        up, down = topology.forward_group, topology.backward_group
        self.order: Order = [step for step in program if isinstance(step, Action)]
        """What the stage does, first to last."""
        backward = any(action.kind == "backward" for action in self.order)
        # between a send and its receive the neighbor may be a pipeline's depth behind
        pending = stages + 1
        self.below: Inbox | None = None
        self.above: Inbox | None = None
        self.up: Outbox | None = None
        self.down: Outbox | None = None
        self.memory_in: Inbox | None = None
        """On the first stage: what left the last one."""
        self.memory_out: Outbox | None = None
        """On the last stage: to the first one."""
        self.memory_gradient_in: Inbox | None = None
        """On the last stage: gradients on what it sent."""
        self.memory_gradient_out: Outbox | None = None
        """On the first stage: to the last one."""
        if stage > 0:
            assert up is not None
            assert down is not None
            self.below = Inbox(up, stage - 1, shapes_below, dtype, device)
            if backward:
                self.down = Outbox(down, stage - 1, pending)
        if stage < stages - 1:
            assert up is not None
            assert down is not None
            self.up = Outbox(up, stage + 1, pending)
            if backward:
                self.above = Inbox(down, stage + 1, shapes_above, dtype, device)
        if memories and stages > 1:
            self._open_memories(topology, memories, dtype, backward)
        self._inboxes: dict[Channel, tuple[Inbox | None, int]] = {
            "hidden chunk": (self.below, 1),
            "gradient": (self.above, 1),
            "memory": (self.memory_in, len(memories)),
            "gradient of the memory": (self.memory_gradient_in, len(memories)),
        }
        self._steps = iter(program)
        self.advance()

    def _open_memories(self, topology: Topology, memories: Sequence[Shape], dtype: torch.dtype, backward: bool) -> None:
        """Connect the last stage with the first one; no send is waited for before the end."""
        first, last = 0, 1
        forward_group, backward_group = topology.memory_group, topology.memory_gradient_group
        if forward_group is None or backward_group is None:  # a stage in the middle
            return
        pending = len(self.order) * len(memories)
        if topology.first_stage:
            self.memory_in = Inbox(forward_group, last, cycle(memories), dtype, topology.device)
            if backward:
                self.memory_gradient_out = Outbox(backward_group, last, pending)
        else:
            self.memory_out = Outbox(forward_group, first, pending)
            if backward:
                self.memory_gradient_in = Inbox(backward_group, first, cycle(memories), dtype, topology.device)

    def advance(self) -> None:
        """Post the receives between an action, whose result has been sent, and the next one.

        None may be posted earlier: see `megamem.pipeline.hazards`.
        """
        for step in self._steps:
            if isinstance(step, Action):
                return
            if isinstance(step, Receive):
                inbox, tensors = self._inboxes[step.transfer.channel]
                assert inbox is not None
                for _ in range(tensors):
                    inbox.post()

    def flush(self) -> None:
        """Wait until all that was sent has left."""
        for outbox in (self.up, self.down, self.memory_out, self.memory_gradient_out):
            if outbox is not None:
                outbox.flush()
