"""What a rank of a running engine holds, counted on its tensors: beside what was planned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from megamem.pipeline.base import TrainingEngine


def held_by(engine: TrainingEngine) -> dict[str, int]:
    """Bytes of `weights`, `gradients` and `optimizer` (moments, and FP32 weights where ZeRO keeps its own).

    Gradients are there between the last backward pass of a step and its update; the optimizer's state after a step.
    """
    inner: Any = engine.engine.optimizer
    zero = engine.config.parallel.zero_stage
    masters = [p for group in engine.optimizer.param_groups for p in group["params"]] if zero else []
    moments = [value for state in engine.optimizer.state.values() for value in state.values() if value.ndim]
    weights = [getattr(parameter, "ds_tensor", parameter) for parameter in engine.stage.parameters()]
    return {
        "weights": _bytes(weights),
        "gradients": _bytes(_gradients(engine, inner)),
        "optimizer": _bytes([*masters, *moments]),
    }


def _gradients(engine: TrainingEngine, inner: Any) -> Iterator[Tensor]:
    """Wherever DeepSpeed keeps the sums: parameters, flat FP32 groups (BF16), partitions (ZeRO 2), one buffer (3)."""
    flat = getattr(inner, "fp32_groups_gradients_flat", None)
    divided = getattr(inner, "averaged_gradients", None) or {}
    if flat is not None:
        yield from flat
    elif engine.config.parallel.zero_stage == 3:
        yield inner.grad_partitions_flat_buffer
    elif engine.config.parallel.zero_stage == 2:
        yield from (gradient for group in divided.values() for gradient in group or () if gradient is not None)
    else:
        yield from (p.grad for p in engine.stage.parameters() if p.grad is not None)


def _bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
