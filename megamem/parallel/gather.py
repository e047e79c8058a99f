"""Whole tensors from their shards: tensor-parallel ranks by the declared axis, ZeRO partitions by DeepSpeed."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megamem.parallel.linears import info


def gather_shards(local: Tensor, axis: int | None, group: ProcessGroup) -> Tensor:
    """Return the whole tensor [...] of the ranks' parts `local` on every rank; `axis` None: it is replicated."""
    if axis is None or group.size() == 1:
        return local
    parts = [torch.empty_like(local.contiguous()) for _ in range(group.size())]
    dist.all_gather(parts, local.contiguous(), group=group)
    return torch.cat(parts, dim=axis)


def whole_parameter(parameter: nn.Parameter, group: ProcessGroup) -> Tensor:
    """Return a parameter's FP32 master value under any ZeRO stage, whole over `group`. A collective of all ranks.

    A frozen parameter has the value that training computes with.
    """
    from deepspeed.utils import safe_get_full_fp32_param

    if not parameter.requires_grad and hasattr(parameter, "ds_id"):
        local = _gathered(parameter)
    else:
        local = safe_get_full_fp32_param(parameter)
    local = parameter.detach().float() if local is None else local.view(_local_shape(parameter))
    return gather_shards(local, info(parameter).shard_axis, group)


def _gathered(parameter: nn.Parameter) -> Tensor:
    """Return a parameter [...] that ZeRO 3 has partitioned and no optimizer knows, in FP32."""
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    with GatheredParameters([parameter]):
        return parameter.detach().float().clone()


def whole_gradient(parameter: nn.Parameter, group: ProcessGroup) -> Tensor:
    """FP32 gradient accumulated so far, reduced over data-parallel ranks, whole over `group`.

    To be called by all ranks between the last backward and the optimizer step.
    """
    from deepspeed.utils import safe_get_full_grad

    local = safe_get_full_grad(parameter)
    if local is None:
        raise RuntimeError(f"no gradient for a parameter of shape {_local_shape(parameter)}")
    return gather_shards(local.float().view(_local_shape(parameter)), info(parameter).shard_axis, group)


def _local_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return this rank's shape before ZeRO-3 partitions it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))
