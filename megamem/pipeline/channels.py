"""What crosses a border between two stages: one floating tensor per unit and direction, in the order of the schedule.

Nothing here blocks on the order of the other side: receives are posted ahead of their use, sends are left to finish by
themselves. Shapes are known to both sides from the schedule and never sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

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
        self, group: ProcessGroup, source: int, shapes: Iterable[Shape], dtype: torch.dtype, device: torch.device
    ) -> None:
        """shapes: of all the tensors that will come."""
        self._group, self._source = group, source
        self._shapes: Iterator[Shape] = iter(shapes)
        self._dtype, self._device = dtype, device
        self._posted: deque[tuple[dist.Work, Tensor]] = deque()
        for _ in range(self.AHEAD):
            self._post()

    def _post(self) -> None:
        shape = next(self._shapes, None)
        if shape is not None:
            buffer = torch.empty(shape, dtype=self._dtype, device=self._device)
            work = dist.irecv(buffer, group=self._group, group_src=self._source)
            assert work is not None
            self._posted.append((work, buffer))

    def take(self) -> Tensor:
        """The next tensor; waits for it (on CUDA, the stream waits)."""
        work, buffer = self._posted.popleft()
        work.wait()
        self._post()
        return buffer


class Outbox:
    """Tensors to one neighbour, in order."""

    def __init__(self, group: ProcessGroup, target: int, pending: int) -> None:
        """pending: sends that may be under way; the oldest is waited for when there are more."""
        self._group, self._target, self._pending = group, target, pending
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()

    def put(self, tensor: Tensor) -> None:
        """Send a copy-free view of `tensor`, which must not be written to any more."""
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
    """A stage's four channels for one pass over a schedule; those at the ends of the pipeline are None."""

    def __init__(self, topology: Topology, shapes: Iterable[Shape], dtype: torch.dtype, backward: bool) -> None:
        """shapes: of all units in the order of their forwards; with `backward`, all alike (one static shape)."""
        stage, stages, device = topology.pp_rank, topology.pp_size, topology.device
        up, down = topology.forward_group, topology.backward_group
        shapes = list(shapes)
        # between a send and its receive the neighbour may be a pipeline's depth behind
        pending = stages + 1
        self.below: Inbox | None = None
        self.above: Inbox | None = None
        self.up: Outbox | None = None
        self.down: Outbox | None = None
        if stage > 0:
            assert up is not None
            assert down is not None
            self.below = Inbox(up, stage - 1, shapes, dtype, device)
            if backward:
                self.down = Outbox(down, stage - 1, pending)
        if stage < stages - 1:
            assert up is not None
            assert down is not None
            self.up = Outbox(up, stage + 1, pending)
            if backward:
                self.above = Inbox(down, stage + 1, shapes, dtype, device)

    def flush(self) -> None:
        """Wait until all that was sent has left."""
        for outbox in (self.up, self.down):
            if outbox is not None:
                outbox.flush()


def warm_up(topology: Topology) -> None:
    """Let every pair of neighbours meet once, in a fixed order: NCCL connects a pair when it first speaks."""
    token = torch.zeros(1, device=topology.device)
    stage = topology.pp_rank
    for lower in range(topology.pp_size - 1):
        for group, source, target in (
            (topology.forward_group, lower, lower + 1),
            (topology.backward_group, lower + 1, lower),
        ):
            if stage == source:
                dist.send(token, group=group, group_dst=target)
            elif stage == target:
                dist.recv(token, group=group, group_src=source)
