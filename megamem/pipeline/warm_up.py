"""What a pipeline does before its first step, while no receive is posted, so that less is left to do while one is.

Communicators are made when they are first used, kernels are loaded and the allocator's pools and cuBLAS's workspaces
are made when a stage first computes. All of this may wait for a whole device. Steps are free of hazards whenever it
does (`megamem.pipeline.hazards`), but each wait costs time, and that of a communicator needs the other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megamem.memory.base import States, detach
from megamem.model.objective import Objective
from megamem.model.stage import Stage
from megamem.parallel.topology import Topology
from megamem.pipeline.train_chunk import MicroBatch, train_chunk


def connect(topology: Topology) -> None:
    """Use every communicator of this rank once, in one order on all ranks: NCCL connects ranks when they first speak.

    First the groups that sum, then the two ways between last and first stage, then each border's two ways, from the
    first one up. A collective call.
    """
    token = torch.zeros(1, device=topology.device)
    layers = topology.model_group, topology.pp_group, topology.dp_group, topology.tp_group
    for group in (dist.group.WORLD, *layers, topology.ends_group):
        if group is not None:
            dist.all_reduce(token, group=group)
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
            if topology.pp_rank == source:
                dist.send(token, group=group, group_dst=target)
            elif topology.pp_rank == target:
                dist.recv(token, group=group, group_src=source)
    if topology.device.type == "cuda":
        torch.cuda.synchronize(topology.device)


def rehearse(
    stage: Stage,
    objective: Objective,
    micro_batches: Sequence[MicroBatch],
    states: States,
    chunk_size: int,
    bptt_chunks: int,
) -> None:
    """Run a stage forward and backward over the first two chunks of micro-batches, without its neighbours.

    What comes from the stage below is zero. Gradients are computed and dropped: none is added to a parameter's, and
    hooks that wait for that are not called. Parameters, gradients, states and random numbers are afterwards what they
    were. All tensor-parallel ranks of a stage call it together.

    Args:
        micro_batches: what is read, one for each reading of the objective.
        states: before each of them, by component.
        chunk_size: tokens of a chunk.
        bptt_chunks: chunks of a window: the two are in one graph if they are in one window.
    """
    device = next(stage.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for micro_batch in micro_batches:
            current, roots, entered = states, list[Tensor](), list[Tensor]()
            last = min(2, len(micro_batch.places)) - 1
            for chunk in range(last + 1):
                hidden, after = _forward(stage, objective, micro_batch, current, chunk, chunk_size, roots)
                entered += [hidden] if hidden.requires_grad else []
                current = {name: after[name] for name in states}
                if chunk == last or bptt_chunks == 1:
                    _backward(stage, roots, entered)
                    current, roots, entered = detach(current), [], []


def _forward(
    stage: Stage,
    objective: Objective,
    micro_batch: MicroBatch,
    states: States,
    chunk: int,
    chunk_size: int,
    roots: list[Tensor],
) -> tuple[Tensor, States]:
    """Read a chunk; its losses and output join `roots`.

    Returns: what entered, ids [tokens, batch] or hidden [tokens, batch, hidden]; the states after it.
    """
    batch, place = micro_batch.batch, micro_batch.places[chunk]
    tokens = slice(chunk * chunk_size, (chunk + 1) * chunk_size)
    entered = batch.tokens[tokens]
    if not stage.first:
        weight = next(stage.parameters())
        shape = stage.border_shape(chunk_size, place.rows, place.starts[0])
        entered = torch.zeros(shape, dtype=weight.dtype, device=weight.device, requires_grad=True)
    own = objective.readings[micro_batch.reading].objective
    result = train_chunk(stage, own, entered, batch.labels[tokens], states, place, check=False)
    outputs = [*result.losses.values(), *result.auxiliary.values(), *([] if stage.last else [result.hidden])]
    roots += [tensor for tensor in outputs if tensor.requires_grad]
    return entered, result.states


def _backward(stage: Stage, roots: Sequence[Tensor], entered: Sequence[Tensor]) -> None:
    """Take gradients of scalars and tensors [...] in the parameters and what entered, and drop them."""
    learning = [parameter for parameter in stage.parameters() if parameter.requires_grad]
    if roots:
        torch.autograd.grad(roots, [*learning, *entered], [torch.ones_like(root) for root in roots], allow_unused=True)
