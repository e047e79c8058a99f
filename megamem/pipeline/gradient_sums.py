"""Sums of gradients over data-parallel ranks under ZeRO 1 and 2 in BF16: each on the rank that updates it, in buckets,
while the backward pass goes on.

DeepSpeed 0.19 does not do so by itself. Under ZeRO 1 its `BF16_Optimizer` adds BF16 gradients up in flat FP32 tensors,
and `DeepSpeedEngine.buffered_allreduce_fallback` all-reduces copies of all of them when the last backward pass is over:
every rank gets every sum, though it updates a part. Under ZeRO 2 `DeepSpeedZeroOptimizer.average_tensor` fills buckets
while a backward pass runs, but waits for each; with `overlap_comm` its reductions to the ranks that need them
(`allreduce_and_copy`) let the host wait for the whole device, bucket by bucket. What is replaced here is who sums, and
when. How gradients are added up, divided and used stays DeepSpeed's.

A partition is a run of neighbouring parameters, whose gradients a backward pass makes one after the other. A reduction
to the partition's rank can leave while others are still to come; a reduce-scatter would need gradients of all
partitions, the last of which comes when the pass is over. Both move the same bytes, half of an all-reduce's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megamem.parallel.topology import DeepSpeedGroups, Topology
from megamem.pipeline.deepspeed_settings import BUCKET


class GradientSums:
    """Sums as DeepSpeed's engine makes them: FP32, ZeRO 0 and 3. The interface of the others."""

    def __init__(self, engine: Any) -> None:
        """engine: DeepSpeed's."""
        self.engine = engine

    def last_backward(self) -> None:
        """Hear that the backward pass that comes is the last one of a step on this rank."""

    def after_backward(self) -> None:
        """End what the backward pass of DeepSpeed's engine has begun; called after each."""

    def after_pipeline(self) -> None:
        """Sum, once all backward passes of a stage are over that did not go through DeepSpeed's engine."""
        self.engine.allreduce_gradients()

    def close(self) -> None:
        """Let go of optimizer and parameters."""


def gradient_sums(engine: Any, topology: Topology, stage: nn.Module, late: Collection[nn.Parameter]) -> GradientSums:
    """Return what sums the gradients of DeepSpeed's engine.

    Args:
        engine: DeepSpeed's.
        topology: this rank among the others.
        stage: whose parameters `engine` trains, in the order in which a forward pass uses them.
        late: the parameters whose gradients change after the last backward pass.
    """
    # in FP32 a bucket's memory is where DeepSpeed takes the sums from as soon as it has called for them
    if engine.bfloat16_enabled() and engine.zero_optimization_stage() == 1:
        return FlatSums(engine, topology, list(stage.parameters()), late, BUCKET)
    if engine.bfloat16_enabled() and engine.zero_optimization_stage() == 2:
        return BucketSums(engine, topology)
    return GradientSums(engine)


@dataclass
class Bucket:
    """Neighbouring gradients in a flat tensor, which leave together."""

    parameters: Sequence[nn.Parameter]
    pieces: Sequence[tuple[int, Tensor]]
    """(rank of the data-parallel group, the sums [elements] that it updates)."""
    late: bool
    """Whether they change after the last backward pass."""
    missing: int = 0
    """Gradients that the last backward pass has not made yet."""


class FlatSums(GradientSums):
    """ZeRO 1 in BF16: the flat FP32 sums of `BF16_Optimizer`, reduced in place during the last backward pass.

    All ranks send buckets in one order, whatever the order in which their gradients come. A gradient that does not come
    holds back the buckets behind it until the pass is over.
    """

    def __init__(
        self,
        engine: Any,
        topology: Topology,
        parameters: Sequence[nn.Parameter],
        late: Collection[nn.Parameter],
        size: int,
    ) -> None:
        """Take the sums over from DeepSpeed.

        parameters: in the order in which a forward pass uses them.
        size: elements from which on a bucket is full.
        """
        super().__init__(engine)
        engine.enable_backward_allreduce = False
        self.optimizer, self.group = engine.optimizer, topology.dp_group
        # a rank has the sums of its partition alone: norm and clipping go over those, the norm's squares over all ranks
        self._own = list(self._own_sums(topology))
        self.optimizer.get_grads_for_norm, self.optimizer.mpu = self._gradients_for_norm, _AllRanks(topology)
        place = {id(parameter): index for index, parameter in enumerate(parameters)}

        def order(bucket: Bucket) -> tuple[bool, int]:
            """Return the key by which buckets leave: as the last of their gradients comes."""
            return bucket.late, -min(place[id(parameter)] for parameter in bucket.parameters)

        self.buckets = sorted(self._buckets({id(parameter) for parameter in late}, size), key=order)
        self._bucket_of = {id(p): bucket for bucket in self.buckets for p in bucket.parameters}
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._came)
            for bucket in self.buckets
            for parameter in bucket.parameters
        ]
        self._sending = False
        self._sent = 0
        self._under_way: list[dist.Work] = []

    def _buckets(self, late: Collection[int], size: int) -> Iterator[Bucket]:
        """Yield the buckets of all groups of parameters. late: `id` of those whose gradients change afterwards."""
        flats = self.optimizer.fp32_groups_gradients_flat
        for group, flat in zip(self.optimizer.bf16_groups, flats, strict=True):
            parameters: list[nn.Parameter] = []
            first = end = sum(parameter.numel() for parameter in group)
            for parameter in reversed(group):
                if parameters and (end - first >= size or (id(parameter) in late) != (id(parameters[0]) in late)):
                    yield self._bucket(parameters, flat, first, end, late)
                    parameters, end = [], first
                parameters.append(parameter)
                first -= parameter.numel()
            yield self._bucket(parameters, flat, first, end, late)

    def _bucket(
        self, parameters: Sequence[nn.Parameter], flat: Tensor, first: int, end: int, late: Collection[int]
    ) -> Bucket:
        """Return the bucket of the elements from `first` to `end` of `flat` [N], the sums of a group of parameters."""
        partition = flat.numel() // self.group.size()
        owners = range(first // partition, (end - 1) // partition + 1)
        cuts = [(max(first, owner * partition), min(end, (owner + 1) * partition)) for owner in owners]
        pieces = [(owner, flat[start:stop]) for owner, (start, stop) in zip(owners, cuts, strict=True)]
        return Bucket(parameters, pieces, id(parameters[0]) in late)

    def _own_sums(self, topology: Topology) -> Iterator[tuple[Tensor, bool]]:
        """Yield this rank's sums [elements] of each parameter, and whether the norm counts them here.

        What tensor-parallel ranks or stages hold alike is counted once.
        """
        groups = zip(self.optimizer.bf16_groups, self.optimizer.fp32_groups_gradients_flat, strict=True)
        for group, flat in groups:
            partition = flat.numel() // topology.dp_size
            first, end = topology.dp_rank * partition, (topology.dp_rank + 1) * partition
            at = 0
            for parameter in group:
                start, stop = max(at, first), min(at + parameter.numel(), end)
                at += parameter.numel()
                sharded = parameter.tensor_model_parallel or topology.tp_rank == 0
                if start < stop:
                    yield flat[start:stop], sharded and not getattr(parameter, "ds_pipe_replicated", False)

    def _gradients_for_norm(self, for_clipping: bool = False) -> list[Tensor] | tuple[list[Tensor], dict[str, Any]]:
        """See `BF16_Optimizer.get_grads_for_norm`, whose norm wants one tensor at least."""
        if for_clipping:
            return [sums for sums, _ in self._own]
        counted = [sums for sums, here in self._own if here]
        return counted or [self.optimizer.fp32_groups_gradients_flat[0].new_zeros(1)], {}

    def last_backward(self) -> None:
        """See `GradientSums.last_backward`."""
        self._sending, self._sent = True, 0
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)

    def _came(self, parameter: Tensor) -> None:
        """Send what is complete with the gradient of `parameter` [...], which DeepSpeed's hook has added to its sum."""
        if not self._sending:
            return
        self._bucket_of[id(parameter)].missing -= 1
        while self._sent < len(self.buckets):
            bucket = self.buckets[self._sent]
            if bucket.missing or bucket.late:
                break
            self._send(bucket)

    def _send(self, bucket: Bucket) -> None:
        """Begin the reductions of a bucket."""
        self._sent += 1
        if self.group.size() > 1:
            for owner, sums in bucket.pieces:
                work = dist.reduce(sums, group_dst=owner, group=self.group, async_op=True)
                self._under_way.append(cast(dist.Work, work))

    def after_backward(self) -> None:
        """Send what is left of the last backward pass, and wait; means of all ranks are in this rank's partition."""
        if not self._sending:
            return
        self._sending = False
        for bucket in self.buckets[self._sent :]:
            self._send(bucket)
        for work in self._under_way:
            work.wait()
        self._under_way.clear()
        if self.group.size() > 1:
            torch._foreach_mul_(self.optimizer.fp32_groups_gradient_flat_partition, 1 / self.group.size())

    def after_pipeline(self) -> None:
        """See `GradientSums.after_pipeline`."""
        self.after_backward()

    def close(self) -> None:
        """See `GradientSums.close`."""
        for hook in self._hooks:
            hook.remove()
        self.buckets, self._bucket_of, self._own = [], {}, []


class BucketSums(GradientSums):
    """ZeRO 2 in BF16: DeepSpeed fills a bucket, and goes on with the pass while it is reduced in FP32.

    One bucket is on its way while the next is sent, so that there are at most two besides the one that is filled.
    """

    def __init__(self, engine: Any, topology: Topology) -> None:
        """Take the reductions over from DeepSpeed."""
        super().__init__(engine)
        self.group = topology.dp_group
        self._under_way: deque[tuple[dist.Work, Tensor, Sequence[Tensor]]] = deque()
        """Reductions, what they reduce, and the sums that it is added to if they are this rank's."""
        engine.optimizer.allreduce_and_copy = self._send

    def _send(
        self,
        bucket: Sequence[Tensor],
        communication_data_type: torch.dtype,
        rank: int,
        output_bucket: Sequence[Tensor],
        **_: object,
    ) -> None:
        """See `DeepSpeedZeroOptimizer.allreduce_and_copy`: begin to sum a bucket on one rank of the group.

        Args:
            bucket: BF16 gradients [N], whose memory is filled anew when this returns.
            communication_data_type: FP32.
            rank: of the data-parallel group, who updates what they belong to.
            output_bucket: on that rank the parts [N] of its FP32 sums, to which they are added; else of Nones.
        """
        sums = torch.cat([gradients.to(communication_data_type) for gradients in bucket])
        while self._under_way and sum(tensor.numel() for _, tensor, _ in self._under_way) + sums.numel() > BUCKET:
            self._add()
        work = cast(dist.Work, dist.reduce(sums, group_dst=rank, group=self.group, async_op=True))
        self._under_way.append((work, sums, output_bucket if rank == self.group.rank() else ()))

    def _add(self) -> None:
        """Wait for the oldest reduction and add it to the sums of the step."""
        work, sums, outputs = self._under_way.popleft()
        work.wait()
        at = 0
        for output in outputs:
            output.add_(sums[at : at + output.numel()])
            at += output.numel()

    def after_backward(self) -> None:
        """See `GradientSums.after_backward`."""
        while self._under_way:
            self._add()

    def close(self) -> None:
        """See `GradientSums.close`."""
        self._under_way.clear()


class _AllRanks(DeepSpeedGroups):
    """Groups under which squares of gradients are summed over all ranks of the run."""

    def get_model_parallel_group(self) -> ProcessGroup:
        """See `DeepSpeedGroups.get_model_parallel_group`."""
        return cast(ProcessGroup, dist.group.WORLD)
