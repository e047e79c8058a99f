"""The model under DeepSpeed: builds both, and runs one optimizer step over a schedule of windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megamem.config.run import RunConfig
from megamem.data.batch import Batch
from megamem.memory.base import LABEL_IGNORED, State
from megamem.model.compiled import compile_pointwise
from megamem.model.stage import Stage
from megamem.parallel.linears import initialize_parameters
from megamem.parallel.megatron import MegatronLinears
from megamem.parallel.topology import Topology
from megamem.pipeline.schedule import window_schedule
from megamem.training.optimizer import AgreeingAdamW, parameter_groups
from megamem.training.window import Window, select_states

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def build_stage(config: RunConfig, topology: Topology) -> Stage:
    """The model of this rank on its device, in FP32, initialised the same whatever the layout."""
    linears = MegatronLinears(topology.tp_group, config.parallel.sequence_parallel)
    with topology.device:
        stage = Stage(config.model, linears)
    initialize_parameters(stage, config.training.seed, topology.tp_size, topology.tp_rank)
    stage.recompute = config.training.recompute
    if config.training.compile:
        compile_pointwise(stage)
    return stage


def deepspeed_config(config: RunConfig, windows: int) -> dict[str, Any]:
    """What DeepSpeed is told; everything it would otherwise assume is written out."""
    parallel, training = config.parallel, config.training
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": training.micro_batch_size,
        "gradient_accumulation_steps": windows,
        "gradient_clipping": config.optimizer.clip,
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
        "zero_allow_untested_optimizer": True,
        "communication_data_type": "fp32",
        "zero_optimization": {
            "stage": parallel.zero_stage,
            "overlap_comm": False,
            "contiguous_gradients": True,
            "stage3_param_persistence_threshold": 0,
        },
    }
    if training.precision == "bf16":
        settings["bf16"] = {"enabled": True, "immediate_grad_update": True}
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings


@dataclass(frozen=True)
class StepResult:
    """What a step leaves on the device; reading a tensor's value makes the host wait."""

    loss_sum: Tensor
    """Summed cross-entropy of this rank's tokens, nats, float64 scalar."""
    predicted: Tensor
    """Predicted tokens over all ranks, float64 scalar."""
    bad: Tensor
    """1.0 if the ranks agreed to skip the update, else 0.0."""
    grad_norm: Any
    """Global gradient norm before clipping, as DeepSpeed or torch gives it."""


class TrainingEngine:
    """One rank's model, optimizer and, in streams mode, memory states carried from step to step."""

    def __init__(self, config: RunConfig, topology: Topology) -> None:
        import deepspeed

        self.config = config
        self.topology = topology
        self.accumulation = config.accumulation_steps(topology.dp_size)
        self.windows = self.accumulation * (config.chunks // config.bptt_chunks)
        self.dtype = DTYPES[config.training.precision]
        self.stage = build_stage(config, topology)
        self.optimizer = AgreeingAdamW(
            parameter_groups(self.stage.parameters(), config.optimizer.weight_decay), config.optimizer
        )
        self.engine, *_ = deepspeed.initialize(
            model=Window(self.stage),
            optimizer=self.optimizer,
            config=deepspeed_config(config, self.windows),
            mpu=topology.mpu(),
            dist_init_required=False,
        )
        self.carried: dict[int, list[State]] = {}

    def fresh_states(self, rows: int) -> list[State]:
        """States of documents not begun."""
        return self.stage.initial_states(rows, self.topology.device, self.dtype)

    def backward(self, batches: Sequence[Batch], watch: Any = None) -> tuple[Tensor, Tensor, dict[int, list[State]]]:
        """Forward and backward of all windows of a step.

        Args:
            batches: this rank's micro-batches, on its device.
            watch: called with a few words before each window.
        Returns: summed cross-entropy of this rank, predicted tokens of all ranks, the states at the end.
        """
        config = self.config
        predicted = sum((b.labels != LABEL_IGNORED).sum() for b in batches).double()  # type: ignore[union-attr]
        dist.all_reduce(predicted, group=self.topology.dp_group)
        # the loss is a mean over all predicted tokens; DeepSpeed averages over data-parallel ranks and backward calls
        scale = (self.topology.dp_size * self.windows / predicted.clamp(min=1)).float()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.topology.device)
        states: dict[int, list[State]] = {}
        passes = list(window_schedule(len(batches), config.chunks, config.bptt_chunks))
        for index, window in enumerate(passes):
            if watch is not None:
                watch(f"micro-batch {window.sequence}, chunks {window.first}-{window.last}")
            if window.begins:
                states[window.sequence] = self._states_before(window.sequence, batches[window.sequence])
            batch = batches[window.sequence]
            size = config.model.chunk_size
            tokens = slice(window.first * size, (window.last + 1) * size)
            loss, nats, states[window.sequence] = self.engine(
                batch.tokens[tokens],
                batch.labels[tokens],
                batch.starts[window.first : window.last + 1],
                states[window.sequence],
                scale,
            )
            self.engine.backward(loss)
            if index < len(passes) - 1:
                self.engine.step()  # counts the micro-step; updates nothing before the last
            loss_sum += nats
        return loss_sum, predicted, states

    def _states_before(self, sequence: int, batch: Batch) -> list[State]:
        if self.config.data.feeding == "streams" and sequence in self.carried:
            return self.carried[sequence]
        return self.fresh_states(batch.tokens.shape[1])

    def step(self, batches: Sequence[Batch], lr: float, watch: Any = None) -> StepResult:
        """One optimizer step. If the loss or a gradient of any rank is not finite, no rank updates anything."""
        loss_sum, predicted, states = self.backward(batches, watch)
        if watch is not None:
            watch("gradient reduction and optimizer step")
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        own_bad = torch.maximum(1 - loss_sum.isfinite().float(), self._bad_partitions())
        self.optimizer.own_bad, self.optimizer.bad = own_bad, None
        norm = self._plain_norm() if self.config.parallel.zero_stage == 0 else None
        self.engine.step()
        # DeepSpeed may have refused the update itself (ZeRO's norm check), then the optimizer never saw it
        refused = bool(getattr(self.engine.optimizer, "overflow", False))
        bad = torch.ones_like(own_bad) if refused or self.optimizer.bad is None else self.optimizer.bad
        if self.config.data.feeding == "streams":
            for sequence, new in states.items():
                old = self.carried.get(sequence) or self.fresh_states(batches[sequence].tokens.shape[1])
                self.carried[sequence] = select_states(bad == 0, new, old)
        return StepResult(loss_sum, predicted, bad, self.engine.get_global_grad_norm() if norm is None else norm)

    def _bad_partitions(self) -> Tensor:
        """1.0 if a gradient that this rank holds for ZeRO's update is not finite, else 0.0.

        ZeRO updates parameter group by parameter group: the optimizer would see the second group's gradients after it
        has updated the first. DeepSpeed's own check is of the norm, which counts what tensor-parallel ranks share once.
        """
        groups = getattr(self.engine.optimizer, "averaged_gradients", {}).values()
        partitions = [gradient for group in groups for gradient in group or () if gradient is not None]
        if not partitions:
            return torch.zeros((), device=self.topology.device)
        norms = torch.stack([norm.float() for norm in torch._foreach_norm(partitions)])
        return 1 - norms.isfinite().all().float()

    def _plain_norm(self) -> Tensor:
        """Global gradient norm without ZeRO: shards are summed over tensor-parallel ranks, replicas counted once."""
        total = torch.zeros((), device=self.topology.device)
        for parameter in self.stage.parameters():
            if parameter.grad is None:
                continue
            mine = parameter.tensor_model_parallel or self.topology.tp_rank == 0  # type: ignore[attr-defined]
            total += parameter.grad.float().square().sum() if mine else 0.0
        dist.all_reduce(total, group=self.topology.tp_group)
        return total.sqrt()

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """This rank's parameters by global name."""
        return dict(cast(Any, self.stage.named_parameters()))
