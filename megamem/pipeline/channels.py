"""What crosses a border between two stages: one floating tensor per unit and direction, in the order of the schedule.

Nothing here blocks on the order of the other side: receives are posted ahead of their use, sends are left to finish by
themselves. Shapes are known to both sides from the schedule and never sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megamem.parallel.topology import Topology

Shape = tuple[int, ...]


class Inbox:
    """Tensors from one neighbour, in order. Each is a buffer of its own: units keep them until their backward."""

    AHEAD = 2
    """Receives posted before they are asked for: the next tensor travels while the present one is worked on."""

    def __init__(
        self,
        group: ProcessGroup,
        source: int,
        shapes: Iterable[Shape],
        dtype: torch.dtype,
        device: torch.device,
        ahead: int = AHEAD,
    ) -> None:
        """Expect tensors of `shapes`, all that will come, from group rank `source`; post `ahead` receives at once."""
        self._group, self._source = group, source
        self._shapes: Iterator[Shape] = iter(shapes)
        self._dtype, self._device = dtype, device
        self._posted: deque[tuple[dist.Work, Tensor]] = deque()
        self._ahead = ahead
        for _ in range(ahead):
            self._post()

    def _post(self) -> None:
        shape = next(self._shapes, None)
        if shape is not None:
            buffer = torch.empty(shape, dtype=self._dtype, device=self._device)
            work = dist.irecv(buffer, group=self._group, group_src=self._source)
            assert work is not None
            self._posted.append((work, buffer))

    def take(self) -> Tensor:
        """Return the next tensor; waits for it (on CUDA, the stream waits)."""
        if not self._ahead:
            self._post()
        work, buffer = self._posted.popleft()
        work.wait()
        if self._ahead:
            self._post()
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
        shapes_below: Iterable[Shape],
        shapes_above: Iterable[Shape],
        dtype: torch.dtype,
        backward: bool,
        memories: Sequence[Shape] = (),
        memory_units: int = 0,
    ) -> None:
        """Open the channels.

        Args:
            shapes_below: of what comes from the stage below for each unit, in the order of their forwards.
            shapes_above: of what goes to the stage above, likewise; with `backward`, all of a border are alike.
            dtype: of everything that is sent.
            backward: whether gradients come down.
            memories: shapes of the tensors that leave the last stage and enter the first one after each unit.
            memory_units: units after which they do.
        """
        stage, stages, device = topology.pp_rank, topology.pp_size, topology.device
        up, down = topology.forward_group, topology.backward_group
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
            self._open_memories(topology, list(memories) * memory_units, dtype, backward)

    def _open_memories(self, topology: Topology, shapes: list[Shape], dtype: torch.dtype, backward: bool) -> None:
        """Connect the last stage with the first one.

        Nothing is received ahead of its use: what the last stage has to send depends on what this one still does.
        """
        first, last = 0, 1
        forward_group, backward_group = topology.memory_group, topology.memory_gradient_group
        if forward_group is None or backward_group is None:  # a stage in the middle
            return
        if topology.first_stage:
            self.memory_in = Inbox(forward_group, last, shapes, dtype, topology.device, ahead=0)
            if backward:
                self.memory_gradient_out = Outbox(backward_group, last, len(shapes))
        else:
            self.memory_out = Outbox(forward_group, first, len(shapes))
            if backward:
                self.memory_gradient_in = Inbox(backward_group, first, shapes, dtype, topology.device, ahead=0)

    def flush(self) -> None:
        """Wait until all that was sent has left."""
        for outbox in (self.up, self.down, self.memory_out, self.memory_gradient_out):
            if outbox is not None:
                outbox.flush()


def warm_up(topology: Topology) -> None:
    """Let every pair of neighbours meet once, in a fixed order: NCCL connects a pair when it first speaks."""
    token = torch.zeros(1, device=topology.device)
    stage = topology.pp_rank
    ends = topology.memory_group, topology.memory_gradient_group
    for group, source in zip(ends, (1, 0), strict=True):
        if group is not None and group.rank() == source:
            dist.send(token, group=group, group_dst=1 - source)
        elif group is not None:
            dist.recv(token, group=group, group_src=source)
    for lower in range(topology.pp_size - 1):
        for group, source, target in (
            (topology.forward_group, lower, lower + 1),
            (topology.backward_group, lower + 1, lower),
        ):
            if stage == source:
                dist.send(token, group=group, group_dst=target)
            elif stage == target:
                dist.recv(token, group=group, group_src=source)
