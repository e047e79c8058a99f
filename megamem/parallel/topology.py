"""The one object that owns process groups. Layers and the optimizer get groups from it, never from globals.

rank = (pp_rank * dp_size + dp_rank) * tp_size + tp_rank: Megatron-Core's default order (tp-cp-ep-dp-pp) and
DeepSpeed's PipeModelDataParallelTopology; `Topology.start` asserts that the libraries agree.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import ProcessGroup

from megamem.errors import LayoutError
from megamem.parallel.libraries import prepare_libraries


def data_parallel_size(world_size: int, tp: int, pp: int, dp: int | None) -> int:
    """DP size from the world size. Raises LayoutError if the sizes do not multiply to it."""
    if world_size % (tp * pp):
        raise LayoutError(
            f"parallel: {world_size} processes cannot be split into TP {tp} x PP {pp}; "
            f"start a multiple of {tp * pp} processes"
        )
    found = world_size // (tp * pp)
    if dp is not None and dp != found:
        raise LayoutError(
            f"parallel.dp: {dp} x TP {tp} x PP {pp} needs {dp * tp * pp} processes, "
            f"but {world_size} were started; start {dp * tp * pp} or leave parallel.dp empty"
        )
    return found


@dataclass(frozen=True)
class Topology:
    """Sizes, this process's coordinates, and its groups."""

    # forward_group and backward_group have the members of pp_group. What crosses a border between stages has one
    # group for each direction: on NCCL the calls of a pair of ranks run in the order of their issue, and the two sides
    # issue sends of one direction and receives of the other in different orders.

    pp_size: int
    dp_size: int
    tp_size: int
    rank: int
    device: torch.device
    tp_group: ProcessGroup
    dp_group: ProcessGroup
    pp_group: ProcessGroup
    """The stages of this rank's pipeline, in order."""
    model_group: ProcessGroup
    """All ranks that hold parts of one model: PP x TP."""
    forward_group: ProcessGroup | None
    """The same stages, for hidden chunks on their way up; None without a pipeline."""
    backward_group: ProcessGroup | None
    """The same stages, for gradients on their way down."""
    ends_group: ProcessGroup | None
    """First and last stage of this rank's pipeline, which share tied embeddings; None elsewhere."""
    memory_group: ProcessGroup | None
    """The same two, for memories that leave the last stage and enter the first one."""
    memory_gradient_group: ProcessGroup | None
    """The same two, for the gradients on them."""

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.pp_size * self.dp_size * self.tp_size

    @property
    def tp_rank(self) -> int:
        """Rank among the processes that share each layer."""
        return self.rank % self.tp_size

    @property
    def dp_rank(self) -> int:
        """Rank among the processes that hold the same parameters."""
        return self.rank // self.tp_size % self.dp_size

    @property
    def pp_rank(self) -> int:
        """The pipeline stage."""
        return self.rank // (self.tp_size * self.dp_size)

    def name(self, rank: int | None = None) -> str:
        """Return a rank in words: `rank 3 (stage 0, dp 1, tp 1)`; the stage only where there are several."""
        rank = self.rank if rank is None else rank
        parts = [f"stage {rank // (self.tp_size * self.dp_size)}"] if self.pp_size > 1 else []
        parts += [f"dp {rank // self.tp_size % self.dp_size}", f"tp {rank % self.tp_size}"]
        return f"rank {rank} ({', '.join(parts)})"

    @staticmethod
    def start(
        tp: int = 1, dp: int | None = None, pp: int = 1, device: str | None = None, timeout_s: float = 600
    ) -> Topology:
        """Join the processes that torchrun started (or run alone) and make all groups.

        A process has one topology at a time: asked again for the same one, it is returned; for another, the groups of
        the one before are gone.

        device: `cpu`, `cuda` or None for CUDA where there is one. timeout_s: seconds a collective may wait.
        """
        global _current
        prepare_libraries()
        from megatron.core import parallel_state

        os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed asks for it in a single process too
        world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
        dp = data_parallel_size(world_size, tp, pp, dp)
        chosen = _device(device)
        # memory coefficients accumulate in FP32 over long histories; TF32 would keep 10 bits of each factor
        torch.set_float32_matmul_precision("highest")
        timeout = timedelta(seconds=timeout_s)
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
            store = HashStore() if world_size == 1 else None
            dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world_size)
        if _current is not None and (tp, pp, chosen, timeout_s) == _current[0]:
            return _current[1]
        before = set(dist.distributed_c10d._world.pg_map)
        if _current is not None:
            parallel_state.destroy_model_parallel()
            for group in _current[2]:  # each has threads and connections
                dist.destroy_process_group(group)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            distributed_timeout_minutes=max(1, round(timeout_s / 60)),
            create_gloo_process_groups=False,
        )
        topology = Topology(
            pp, dp, tp, rank, chosen,
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_data_parallel_group(),
            parallel_state.get_pipeline_model_parallel_group(),
            parallel_state.get_model_parallel_group(),
            **_border_groups(pp, dp * tp, rank, timeout),
        )  # fmt: skip
        topology._assert_order()
        _current = (tp, pp, chosen, timeout_s), topology, set(dist.distributed_c10d._world.pg_map) - before
        return topology

    def _assert_order(self) -> None:
        from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
        from megatron.core import parallel_state

        theirs = PipeModelDataParallelTopology(num_pp=self.pp_size, num_dp=self.dp_size, num_mp=self.tp_size)
        coordinates = theirs.get_coord(self.rank)
        ours = (self.pp_rank, self.dp_rank, self.tp_rank)
        assert (coordinates.pipe, coordinates.data, coordinates.model) == ours
        assert parallel_state.get_pipeline_model_parallel_rank() == self.pp_rank
        assert parallel_state.get_data_parallel_rank() == self.dp_rank
        assert parallel_state.get_tensor_model_parallel_rank() == self.tp_rank

    @property
    def first_stage(self) -> bool:
        """Whether this rank embeds tokens."""
        return self.pp_rank == 0

    @property
    def last_stage(self) -> bool:
        """Whether this rank holds the output head."""
        return self.pp_rank == self.pp_size - 1

    def mpu(self) -> DeepSpeedGroups:
        """Return the groups as DeepSpeed asks for them."""
        return DeepSpeedGroups(self)


_current: tuple[tuple[object, ...], Topology, set[ProcessGroup]] | None = None
"""What this process was asked for, what it got, and the groups that were made for it."""


def _border_groups(stages: int, pipelines: int, rank: int, timeout: timedelta) -> dict[str, ProcessGroup | None]:
    """Return this rank's groups for what crosses borders between stages, by field of `Topology`, or None.

    All ranks make all groups, in the same order.
    """
    names = ("forward_group", "backward_group", "ends_group", "memory_group", "memory_gradient_group")
    mine: dict[str, ProcessGroup | None] = dict.fromkeys(names)
    if stages == 1:
        return mine
    for pipeline in range(pipelines):
        members = [pipeline + stage * pipelines for stage in range(stages)]
        for name in names:
            ranks = members if name in ("forward_group", "backward_group") else [members[0], members[-1]]
            group = dist.new_group(ranks, timeout=timeout)
            if rank in ranks:
                mine[name] = group
    return mine


def _device(wanted: str | None) -> torch.device:
    if wanted == "cpu" or not (wanted or torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise LayoutError(f"parallel.device: {wanted} asked for, but torch finds no CUDA device; use cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    processes = max(local_rank + 1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if processes > torch.cuda.device_count():
        raise LayoutError(
            f"parallel: {processes} processes on a machine with {torch.cuda.device_count()} CUDA device(s); "
            "start at most one process per device"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


class DeepSpeedGroups:
    """DeepSpeed's `mpu` protocol over a `Topology`."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology

    def get_model_parallel_group(self) -> ProcessGroup:
        """Ranks that hold different parts of one model, stages included: gradient norms are summed over them."""
        return self._topology.model_group

    def get_model_parallel_rank(self) -> int:
        """Rank in `get_model_parallel_group`."""
        return self._topology.model_group.rank()

    def get_model_parallel_world_size(self) -> int:
        """Size of `get_model_parallel_group`."""
        return self._topology.model_group.size()

    def get_tensor_model_parallel_group(self) -> ProcessGroup:
        """Ranks that share each layer."""
        return self._topology.tp_group

    def get_tensor_model_parallel_rank(self) -> int:
        """Rank in `get_tensor_model_parallel_group`; DeepSpeed counts replicated parameters on rank 0 only."""
        return self._topology.tp_rank

    def get_tensor_model_parallel_world_size(self) -> int:
        """Size of `get_tensor_model_parallel_group`."""
        return self._topology.tp_size

    def get_data_parallel_group(self) -> ProcessGroup:
        """Ranks that hold the same parameters."""
        return self._topology.dp_group

    def get_data_parallel_rank(self) -> int:
        """Rank in `get_data_parallel_group`."""
        return self._topology.dp_rank

    def get_data_parallel_world_size(self) -> int:
        """Size of `get_data_parallel_group`."""
        return self._topology.dp_size
