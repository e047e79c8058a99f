"""What the tests of gradient sums run on each rank: steps with DeepSpeed's own sums and with ours, and their calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megamem.parallel.gather import whole_parameter
from megamem.parallel.topology import Topology
from megamem.pipeline import base, deepspeed_settings, gradient_sums
from megamem.pipeline.engine import build_engine
from tests.distributed.training_cases import local_batches, run_config

BUCKET = 4096
"""Elements of a bucket: the model has several, some parameters are larger."""
SMALLEST = 64
"""Elements from which on a tensor holds gradients, and not losses, norms or flags."""


@contextmanager
def recorded_calls(group: dist.ProcessGroup) -> Iterator[list[tuple[str, int, bool]]]:
    """Record the collectives of a group: (kind, elements of the tensor that is summed, whether the host went on)."""
    calls: list[tuple[str, int, bool]] = []
    kinds = {name: getattr(dist, name) for name in ("all_reduce", "reduce", "reduce_scatter_tensor")}

    def recording(kind: str) -> Any:
        def call(tensor: torch.Tensor, *arguments: Any, **more: Any) -> Any:
            if more.get("group") is group and tensor.numel() >= SMALLEST:
                calls.append((kind, tensor.numel(), more.get("async_op", False)))
            return kinds[kind](tensor, *arguments, **more)

        return call

    for kind in kinds:
        setattr(dist, kind, recording(kind))
    try:
        yield calls
    finally:
        for kind, function in kinds.items():
            setattr(dist, kind, function)


@contextmanager
def left_to_deepspeed(wanted: bool) -> Iterator[None]:
    """Leave sums to DeepSpeed as it makes them by default, all-reduces of buckets, if `wanted`."""
    ours, settings = base.gradient_sums, base.deepspeed_config

    def theirs(*arguments: Any) -> dict[str, Any]:
        told = settings(*arguments)
        told["zero_optimization"]["use_multi_rank_bucket_allreduce"] = True
        return told

    if wanted:
        base.gradient_sums = lambda engine, *_: gradient_sums.GradientSums(engine)
        base.deepspeed_config = theirs
    try:
        yield
    finally:
        base.gradient_sums, base.deepspeed_config = ours, settings


def train(case: dict[str, Any], deepspeed: bool) -> dict[str, Any]:
    """Steps of a case: losses, norms, weights; the calls of the last step, and how many its last backward made.

    deepspeed: whether DeepSpeed sums gradients by itself.
    """
    deepspeed_settings.BUCKET = gradient_sums.BUCKET = BUCKET
    config = run_config(**case["config"])
    topology = Topology.start(config.parallel.tp, pp=config.parallel.pp, device="cpu", timeout_s=600)
    with left_to_deepspeed(deepspeed):
        engine = build_engine(config, topology)
    out: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(case["steps"]):
        early: list[int] = []
        with recorded_calls(topology.dp_group) as calls:
            _note_end(engine.sums, "after_pipeline" if topology.pp_size > 1 else "after_backward", calls, early)
            result = engine.step(local_batches(config, topology, step), 1e-3, steps_before=step)
        torch.distributed.all_reduce(result.loss_sum, group=topology.dp_group)
        out["losses"].append((result.loss_sum / result.predicted).item())
        out["norms"].append(float(result.grad_norm))
        out |= {"calls": [list(call) for call in calls], "early": early[-1]}
    out["weights"] = {name: whole_parameter(p, topology.tp_group) for name, p in engine.parameters().items()}
    out["gradients"] = sum(p.numel() for p in engine.stage.parameters() if p.requires_grad)
    engine.close()
    return out


def _note_end(sums: Any, method: str, calls: list[tuple[str, int, bool]], early: list[int]) -> None:
    """Note how many calls were made before each end of a backward pass (or of a stage's last one)."""
    end = getattr(type(sums), method)

    def noting() -> None:
        early.append(len(calls))
        end(sums)

    setattr(sums, method, noting)


def both(cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each case with DeepSpeed's own sums, and with ours."""
    return {
        name: {"deepspeed": train(case, deepspeed=True), "ours": train(case, deepspeed=False)}
        for name, case in cases.items()
    }
