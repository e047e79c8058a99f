"""The process groups of a layout: each is made once, and only if the run uses it.

A group costs every member connections and threads, so ranks that are the whole job or one process alone get no group of
their own, and sets of ranks that coincide share one. All ranks make the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TypedDict

import torch.distributed as dist
from torch.distributed import ProcessGroup

Ranks = list[int]


class LayerGroups(TypedDict):
    """The fields of `Topology` that hold the groups of layers."""

    tp_group: ProcessGroup
    dp_group: ProcessGroup
    pp_group: ProcessGroup
    model_group: ProcessGroup


class BorderGroups(TypedDict):
    """The fields of `Topology` that hold the groups of borders between stages."""

    forward_group: ProcessGroup | None
    backward_group: ProcessGroup | None
    ends_group: ProcessGroup | None
    memory_group: ProcessGroup | None
    memory_gradient_group: ProcessGroup | None


class Groups:
    """Makes the groups of one rank, and remembers them in `made`."""

    def __init__(self, rank: int, world_size: int, backend: str | None, timeout: timedelta) -> None:
        """Prepare to make groups on `backend`, that of the whole job if None."""
        self.rank, self.world_size, self.backend, self.timeout = rank, world_size, backend, timeout
        self.made: list[ProcessGroup] = []
        """Groups that were made here and may be destroyed."""
        self._shared: dict[tuple[int, ...], ProcessGroup] = {}

    def layers(self, tp: int, dp: int, pp: int) -> LayerGroups:
        """Return the groups of tensor, data and pipeline parallelism and of one model."""
        grid = [[[(p * dp + d) * tp + t for t in range(tp)] for d in range(dp)] for p in range(pp)]
        return {
            "tp_group": self._shared_group([grid[p][d] for p in range(pp) for d in range(dp)]),
            "dp_group": self._shared_group([[grid[p][d][t] for d in range(dp)] for p in range(pp) for t in range(tp)]),
            "pp_group": self._shared_group([[grid[p][d][t] for p in range(pp)] for d in range(dp) for t in range(tp)]),
            "model_group": self._shared_group([[rank for p in range(pp) for rank in grid[p][d]] for d in range(dp)]),
        }

    def borders(self, stages: int, pipelines: int, tied: bool, memories: bool) -> BorderGroups:
        """Return the groups for what crosses borders between stages; None where nothing does.

        The groups of each direction are not shared: on NCCL the calls of a pair of ranks run in the order of their
        issue, and the two sides issue sends of one direction and receives of the other in different orders.

        Args:
            stages: number of stages.
            pipelines: number of pipelines; their ranks are those of each stage in the same order.
            tied: whether first and last stage share tied embeddings.
            memories: whether memories leave the last stage and enter the first one.
        """
        whole = [[pipeline + stage * pipelines for stage in range(stages)] for pipeline in range(pipelines)]
        ends = [[ranks[0], ranks[-1]] for ranks in whole]
        several = stages > 1
        return {
            "forward_group": self._own_group(whole if several else []),
            "backward_group": self._own_group(whole if several else []),
            "ends_group": self._own_group(ends if several and tied else []),
            "memory_group": self._own_group(ends if several and memories else []),
            "memory_gradient_group": self._own_group(ends if several and memories else []),
        }

    def _shared_group(self, partition: Sequence[Ranks]) -> ProcessGroup:
        """Return this rank's group of a partition of all ranks; the same one for the same ranks."""
        ranks = tuple(next(ranks for ranks in partition if self.rank in ranks))
        if len(ranks) == self.world_size:
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        if ranks not in self._shared:
            group = self._alone() if len(ranks) == 1 else self._own_group(partition)
            assert group is not None
            self._shared[ranks] = group
        return self._shared[ranks]

    def _own_group(self, partition: Sequence[Ranks]) -> ProcessGroup | None:
        """Make one group for each entry of a partition, on all ranks; return the one of this rank, None elsewhere."""
        mine = None
        for ranks in partition:
            group = dist.new_group(ranks, timeout=self.timeout, backend=self.backend)
            if self.rank in ranks:
                assert isinstance(group, ProcessGroup)
                mine = group
                self.made.append(group)
        return mine

    def _alone(self) -> ProcessGroup:
        """Make the group of this rank alone, without a call on other ranks."""
        group = dist.new_group([self.rank], timeout=self.timeout, backend=self.backend, use_local_synchronization=True)
        assert isinstance(group, ProcessGroup)
        self.made.append(group)
        return group


def adopt_tensor_parallel_group(group: ProcessGroup) -> None:
    """Give Megatron-Core the one group that it takes from its globals: its cross-entropy has no argument for it.

    Its own initialization would make a dozen groups for each rank, for kinds of parallelism that are not used here.
    """
    from megatron.core import parallel_state

    parallel_state._TENSOR_MODEL_PARALLEL_GROUP = group
