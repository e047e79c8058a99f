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
from megamem.parallel.groups import Groups, adopt_tensor_parallel_group
from megamem.parallel.libraries import load_kernels_at_once, prepare_libraries


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
    """First and last stage of this rank's pipeline where they share tied embeddings; None elsewhere."""
    memory_group: ProcessGroup | None
    """The same two where memories leave the last stage and enter the first one; None elsewhere."""
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
        tp: int = 1,
        dp: int | None = None,
        pp: int = 1,
        device: str | None = None,
        timeout_s: float = 600,
        tied: bool = True,
        memories: bool = True,
    ) -> Topology:
        """Join the processes that torchrun started (or run alone) and make the groups that a run needs.

        A process has one topology at a time: asked again for the same one, it is returned; for another, the groups of
        the one before are gone.

        Args:
            tp: tensor-parallel size.
            dp: data-parallel size; what the others leave if None.
            pp: pipeline stages.
            device: `cpu`, `cuda` or None for CUDA where there is one.
            timeout_s: seconds a collective may wait.
            tied: whether first and last stage may share tied embeddings.
            memories: whether memories may leave the last stage and enter the first one.

        Raises:
            LayoutError: the sizes do not fit the processes, or a device is missing.
        """
        global _current
        if pp > 1:
            load_kernels_at_once()  # while a stage waits for another one, nothing should wait for its device
        prepare_libraries()

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
        wanted = (tp, pp, chosen, timeout_s, tied, memories)
        if _current is not None and wanted == _current[0]:
            return _current[1]
        if _current is not None:
            for group in _current[2]:  # each has threads and connections
                dist.destroy_process_group(group)
        makers = Groups(rank, world_size, "nccl" if chosen.type == "cuda" else None, timeout)
        topology = Topology(
            pp, dp, tp, rank, chosen, **makers.layers(tp, dp, pp), **makers.borders(pp, dp * tp, tied, memories)
        )
        topology._assert_order()
        adopt_tensor_parallel_group(topology.tp_group)
        _current = wanted, topology, makers.made
        return topology

    def _assert_order(self) -> None:
        """Fail where DeepSpeed or Megatron-Core would number the ranks otherwise."""
        from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
        from megatron.core.parallel_state import RankGenerator

        theirs = PipeModelDataParallelTopology(num_pp=self.pp_size, num_dp=self.dp_size, num_mp=self.tp_size)
        coordinates = theirs.get_coord(self.rank)
        ours = (self.pp_rank, self.dp_rank, self.tp_rank)
        assert (coordinates.pipe, coordinates.data, coordinates.model) == ours
        megatron = RankGenerator(tp=self.tp_size, ep=1, dp=self.dp_size, pp=self.pp_size, cp=1, order="tp-cp-ep-dp-pp")
        for name, group in (("tp", self.tp_group), ("dp", self.dp_group), ("pp", self.pp_group)):
            assert dist.get_process_group_ranks(group) in megatron.get_ranks(name)

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


_current: tuple[tuple[object, ...], Topology, list[ProcessGroup]] | None = None
"""What this process was asked for, what it got, and the groups that were made for it."""


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
    # the number of a device is for a process by itself; ranks of a job have one each
    number = torch.device(wanted or "cuda").index if processes == 1 else None
    if number is not None and number >= torch.cuda.device_count():
        raise LayoutError(f"parallel.device: {wanted}: there are {torch.cuda.device_count()} CUDA device(s)")
    chosen = local_rank if number is None else number
    torch.cuda.set_device(chosen)
    return torch.device("cuda", chosen)


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
