"""A rank's part of the model under DeepSpeed: what all engines share, and one optimizer step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megamem.config.run import RunConfig
from megamem.data.batch import Batch
from megamem.memory.base import DTYPES, LABEL_IGNORED, Chunk, States
from megamem.model.compiled import compile_pointwise
from megamem.model.kernels import use_library_kernels, use_library_recurrences
from megamem.model.objective import Objective, build_objective
from megamem.model.stage import Stage, build_stage
from megamem.parallel.linears import initialize_parameters
from megamem.parallel.megatron import MegatronLinears
from megamem.parallel.topology import Topology
from megamem.pipeline.deepspeed_settings import deepspeed_config
from megamem.pipeline.freezing import fast_parameters, freeze, group_count, learning, learning_names
from megamem.pipeline.gradient_sums import gradient_sums
from megamem.pipeline.optimizer import AgreeingAdamW, parameter_groups
from megamem.pipeline.spikes import SpikeGuard
from megamem.pipeline.train_chunk import MicroBatch, chunk_places, dropout_keys, loss_names
from megamem.pipeline.window import select_states

Watch = Callable[[str], None]
"""Told in a few words what this rank is at, often enough for a watchdog to see progress."""


def build_own_stage(config: RunConfig, topology: Topology, layers: range | None = None, draw: bool = True) -> Stage:
    """Build this rank's part of the model on its device, in FP32, initialized the same whatever the layout.

    Args:
        config: the run.
        topology: this rank among the others.
        layers: those of its stage; all if not given.
        draw: whether parameters get start values. If not, they are memory that nobody has written to: a load follows.
    """
    linears = MegatronLinears(topology.tp_group, config.parallel.sequence_parallel)
    with topology.device:
        stage = build_stage(config.model, linears, layers)
    if draw:
        initialize_parameters(stage, config.training.seed, topology.tp_size, topology.tp_rank)
    stage.recompute = config.training.recompute
    stage.ties_resets = config.parallel.zero_stage == 3
    dtype = DTYPES[config.training.precision]
    if config.training.compile:
        compile_pointwise(stage)
    elif config.training.kernels == "auto":
        use_library_kernels(stage, topology.device, dtype)
    if config.model.recurrence_kernel == "auto":
        use_library_recurrences(stage, topology.device, dtype, _on_all_ranks)
    return stage


def _on_all_ranks(here: bool) -> bool:
    """Return whether something holds on all ranks, which all call this."""
    flag = torch.tensor([here], dtype=torch.int64)
    if dist.is_initialized():
        dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag)


@dataclass(frozen=True)
class StepResult:
    """What a step leaves on the device; reading a tensor's value makes the host wait."""

    losses: Tensor
    """Losses [names] (`TrainingEngine.loss_names`), summed over this data-parallel rank's tokens, float64; the same on
    all stages. Those of further readings are weighted (`MicroBatch.factor`): the sum of all is what is trained on."""
    predicted: Tensor
    """Labels over all ranks in the first reading, float64 scalar: what the sums of losses are divided by."""
    tokens: Tensor
    """Tokens over all ranks, float64 scalar: positions of the data but for padding, however often they are read, some
    of them without a label in tasks."""
    bad: Tensor
    """1.0 if the ranks agreed to skip the update for a loss or gradient that is not finite, else 0.0."""
    spike: Tensor
    """1.0 if they agreed to skip it as a spike, else 0.0."""
    grad_norm: Any
    """Global gradient norm before clipping, as DeepSpeed or torch gives it."""

    @property
    def loss_sum(self) -> Tensor:
        """The objective's first loss, summed over this data-parallel rank's tokens, float64 scalar."""
        return self.losses[0]


class TrainingEngine(ABC):
    """One rank's layers, optimizer and, in streams mode, memory states carried from step to step."""

    observe_states: Callable[[States], None] | None = None
    """Called with this rank's states at the end of a step's last micro-batch, off the graph; None: nobody looks."""

    def __init__(
        self,
        config: RunConfig,
        topology: Topology,
        layers: range | None,
        draw: bool,
    ) -> None:
        """Build stage, optimizer and DeepSpeed's engine.

        Args:
            config: the run.
            topology: this rank among the others.
            layers: those of this rank's stage, all if None.
            draw: whether weights get start values; a run that goes on from a checkpoint loads all of them.
        """
        import deepspeed

        self.config = config
        self.topology = topology
        self.accumulation = config.accumulation_steps(topology.dp_size)
        self.dtype = DTYPES[config.training.precision]
        self.stage = build_own_stage(config, topology, layers, draw)
        if config.data.reset == "exact" and config.parallel.sequence_parallel:
            self.stage.check_reads_borders()
        self.objective = build_objective(config.training.objective, config.model)
        if (names := learning_names(config)) is not None:
            freeze(self.stage, names)
        self.optimizer = AgreeingAdamW(self._groups(), config.optimizer)
        self.engine, *_ = deepspeed.initialize(
            model=self.module(),
            optimizer=self.optimizer,
            config=deepspeed_config(config, self.backwards()),
            mpu=topology.mpu(),
            dist_init_required=False,
        )
        self.sums = gradient_sums(self.engine, topology, self.stage, self.late_parameters())
        training = config.training
        self.spikes = (
            SpikeGuard(training.skip_spikes, training.spike_window, topology.device) if (training.skip_spikes) else None
        )
        """Finds spikes, where the run skips them."""
        self.carried: dict[int, States] = {}
        """The states at the end of each micro-batch where the next step reads on, by its index."""
        self.steps_before = 0
        """Steps that the run has made before the one under way."""
        self.placement = [range(config.model.layers)]
        """Layers of each stage."""

    def _groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's groups, as many on each stage of a pipeline."""
        least = group_count(self.config) if self.topology.pp_size > 1 else 0
        return parameter_groups(learning(self.stage), self.config.optimizer, fast_parameters(self.config), least)

    def module(self) -> torch.nn.Module:
        """Return what DeepSpeed is given."""
        return self.stage

    def late_parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters whose gradients are not complete with the last backward pass of this rank."""
        return []

    def begin_phase(self, config: RunConfig) -> None:
        """Go on with other sequences or batches; weights, moments and the layers of this rank stay.

        config: as it was but for `data` and the portions that `training` names.
        """
        self.config = config
        self.accumulation = config.accumulation_steps(self.topology.dp_size)
        backwards = self.backwards()
        settings, optimizer = self.engine._config, self.engine.optimizer
        rows = config.training.micro_batch_size
        settings.train_micro_batch_size_per_gpu, settings.gradient_accumulation_steps = rows, backwards
        settings.train_batch_size = rows * backwards * self.topology.dp_size
        if hasattr(optimizer, "gradient_accumulation_steps"):
            optimizer.gradient_accumulation_steps = backwards
        # DeepSpeed finds the last backward of a step by counting all of them
        self.engine.micro_steps = 0

    @abstractmethod
    def backwards(self) -> int:
        """Return the calls of DeepSpeed's `backward` in a step."""

    @abstractmethod
    def backward(
        self, micro_batches: Sequence[MicroBatch], predicted: Tensor, watch: Watch | None = None
    ) -> tuple[Tensor, dict[int, States]]:
        """Forward and backward of a whole step, gradients reduced over data-parallel ranks.

        Args:
            micro_batches: this rank's, on its device, each as its reading has it; the same on all stages of a pipeline.
            predicted: labels of all ranks in the first reading, a scalar: what the sums of losses are divided by.
            watch: called with a few words before each action.
        Returns: the losses [names] summed over this data-parallel rank; the states of this rank's
            components at the end of each micro-batch where they are carried over, else nothing.
        """

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches that a step goes through: those of the data, each as often as it is read."""
        return self.accumulation * len(self.objective.readings)

    @property
    def carries(self) -> bool:
        """Whether the next step reads on where this one ends."""
        return self.config.data.feeding == "streams"

    @property
    def loss_names(self) -> tuple[str, ...]:
        """The names of a step's losses: those of the objective's readings, the first of which is the run's, and the
        layers' own."""
        return loss_names(self.stage, self.objective, self.config.training.distill is not None)

    def fresh_states(self, rows: int) -> States:
        """States of documents not begun."""
        return self.stage.initial_states(rows, self.topology.device, self.dtype)

    def counts(self, batches: Sequence[Batch], read: Sequence[Sequence[Batch]]) -> tuple[Tensor, Tensor]:
        """Count labels and tokens of the step over all data-parallel ranks.

        Args:
            batches: this rank's, of the data.
            read: the same in each reading.
        Returns: the labels of each reading, [readings]; the positions but for padding, a scalar; float64 both.
        """
        labels = [torch.stack([(b.labels != LABEL_IGNORED).sum() for b in own]).sum().double() for own in read]
        tokens = labels[0].new_full((), sum(batch.positions - batch.padding for batch in batches))
        counts = torch.stack((*labels, tokens))
        dist.all_reduce(counts, group=self.topology.dp_group)
        return counts[:-1], counts[-1]

    def states_before(self, micro_batch: int, batch: Batch) -> States:
        """States before a micro-batch: fresh, or in streams mode as the step before left them."""
        if self.carries and micro_batch in self.carried:
            return self.carried[micro_batch]
        return self.fresh_states(batch.tokens.shape[1])

    def places(self, index: int, reading: int, batch: Batch) -> list[Chunk]:
        """Return where the chunks of a micro-batch lie, and what dropout draws by: the rows' numbers in the step.

        Args:
            index: of the micro-batch among the data's.
            reading: the rows of each are numbered behind those of the one before, so that all drop other values.
            batch: the micro-batch.
        """
        rows = batch.tokens.shape[1]
        first = reading * self.config.global_rows + (index * self.topology.dp_size + self.topology.dp_rank) * rows
        seed = self.config.training.seed
        return chunk_places(batch, dropout_keys(self.config.model, seed, self.steps_before, range(first, first + rows)))

    def step(
        self, batches: Sequence[Batch], lr: float, watch: Watch | None = None, steps_before: int = 0
    ) -> StepResult:
        """One optimizer step.

        If the loss or a gradient of any rank is not finite, or if the step is a spike, no rank updates anything.

        Args:
            batches: this rank's micro-batches of the data, on its device.
            lr: learning rate.
            watch: called with a few words before each action.
            steps_before: steps that the run has made before; dropout draws by it.
        """
        self.steps_before = steps_before
        if watch is not None:
            watch("counting tokens")
        micro_batches, predicted, tokens = self._read(batches)
        losses, states = self.backward(micro_batches, predicted, watch)
        if watch is not None:
            watch("gradient reduction and optimizer step")
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        own_bad = torch.maximum(1 - losses.sum().isfinite().float(), self._bad_partitions())
        self.optimizer.own_bad, self.optimizer.bad = own_bad, None
        norm = self._clip_plain() if self.config.parallel.zero_stage == 0 else None
        self.optimizer.spike = None
        if (spikes := self.spikes) is not None:
            loss = self._mean_loss(losses, predicted)
            self.optimizer.find_spike = lambda: spikes.judge(loss, self._grad_norm(norm))
        self.engine.step()
        # DeepSpeed may have refused the update itself (ZeRO's norm check), then the optimizer never saw it
        refused = bool(getattr(self.engine.optimizer, "overflow", False))
        bad = torch.ones_like(own_bad) if refused or self.optimizer.bad is None else self.optimizer.bad
        spike = torch.zeros_like(bad) if self.optimizer.spike is None else self.optimizer.spike * (1 - bad)
        if self.carries:
            for micro_batch, new in states.items():
                batch = micro_batches[micro_batch].batch
                old = self.carried.get(micro_batch) or self.fresh_states(batch.tokens.shape[1])
                self.carried[micro_batch] = select_states(bad == 0, new, self._without_ended(old, batch))
        grad_norm = self.engine.get_global_grad_norm() if norm is None else norm
        return StepResult(losses, predicted, tokens, bad, spike, grad_norm)

    def _mean_loss(self, losses: Tensor, predicted: Tensor) -> Tensor:
        """Return the objective's first loss per predicted token of the whole batch, float64 scalar.

        losses: [names] of this data-parallel rank.
        """
        total = losses[0].clone()
        dist.all_reduce(total, group=self.topology.dp_group)
        return total / predicted.clamp(min=1)

    def _grad_norm(self, plain: Tensor | None) -> Tensor:
        """Return the gradient norm as it is known when the optimizer is called, float64 scalar.

        plain: that without ZeRO. ZeRO sets its own just before, and DeepSpeed's engine only after the step.
        """
        norm = self.engine.optimizer._global_grad_norm if plain is None else plain
        return torch.as_tensor(norm, dtype=torch.float64, device=self.topology.device)

    def _read(self, batches: Sequence[Batch]) -> tuple[list[MicroBatch], Tensor, Tensor]:
        """Return micro-batches of the data as each reading of the objective has them, one behind the other.

        Returns: these; the labels of all ranks in the first reading; their tokens, float64 scalars both.
        """
        readings = self.objective.readings
        read = [[_prepared(batch, objective) for batch in batches] for objective, _ in readings]
        predicted, tokens = self.counts(batches, read)
        # sums are divided by the labels of the first reading
        factors = [
            weight * predicted[0].clamp(min=1) / own.clamp(min=1)
            for (_, weight), own in zip(readings, predicted, strict=True)
        ]
        micro_batches = [
            MicroBatch(read[reading][index], self.places(index, reading, batch), reading, factors[reading])
            for index, batch in enumerate(batches)
            for reading in range(len(readings))
        ]
        return micro_batches, predicted[0], tokens

    def _without_ended(self, states: States, batch: Batch) -> States:
        """Return the states before a micro-batch, fresh in rows whose document it ends: what follows is another one."""
        begins = (batch.starts == 0) if batch.begins is None else batch.begins
        ended = Chunk(tuple(0 if begins[:, row].any() else 1 for row in range(begins.shape[1])))
        return self.stage.reset(states, ended, self.topology.device, self.dtype)

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

    def _clip_plain(self) -> Tensor:
        """Global gradient norm without ZeRO; clips to the configured norm.

        Shards are summed over the ranks of the model, what several ranks hold is counted once. (DeepSpeed's own
        clipping counts replicated parameters on the model's first rank only: those of later stages would be missed.)
        """
        total = torch.zeros((), device=self.topology.device)
        gradients = []
        for parameter in self.stage.parameters():
            if parameter.grad is None:
                continue
            gradients.append(parameter.grad)
            sharded: bool = parameter.tensor_model_parallel  # type: ignore[attr-defined]
            if (sharded or self.topology.tp_rank == 0) and not getattr(parameter, "ds_pipe_replicated", False):
                total += parameter.grad.float().square().sum()
        dist.all_reduce(total, group=self.topology.model_group)
        norm = total.sqrt()
        if self.config.optimizer.grad_clip:
            torch._foreach_mul_(gradients, (self.config.optimizer.grad_clip / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def close(self) -> None:
        """Give the memory of parameters, gradients and moments back; nothing can be called afterwards."""
        self.sums.close()
        self.engine.destroy()
        # autograd's nodes may keep hooks, and through them the engine, in the process: its tensors are taken out of it
        for holder in (self.engine.optimizer, self.optimizer, *self.stage.parameters()):
            vars(holder).clear()
        for parameter in self.stage.parameters():
            parameter.data, parameter.grad = parameter.new_empty(0), None

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return this rank's parameters by global name."""
        return dict(cast(Any, self.stage.named_parameters()))


def _prepared(batch: Batch, objective: Objective) -> Batch:
    """Return the micro-batch as the objective wants it read and predicted."""
    tokens, labels = objective.inputs_and_labels(batch.tokens, batch.labels)
    return replace(batch, tokens=tokens, labels=labels)
