"""The two engines: whole windows on ranks that hold the whole model, and chunks through a pipeline of stages.

Both run the schedules of `megamem.pipeline.schedule` and leave ZeRO, BF16 and the update to a plain DeepSpeedEngine.
DeepSpeed's own PipelineEngine is not used: it runs its own instruction list over micro-batches, knows no state between
them, and sends shapes and dtypes before tensors; what it would add to ZeRO 0 and 1 is the reduction of tied weights
and norms over stages, which are here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megamem.config.run import RunConfig
from megamem.costs.parameters import shared_parameters
from megamem.data.batch import Batch
from megamem.memory.base import States
from megamem.parallel.topology import Topology
from megamem.pipeline.balancing import place
from megamem.pipeline.base import TrainingEngine, Watch
from megamem.pipeline.channels import Borders
from megamem.pipeline.distillation import Teacher, open_teacher
from megamem.pipeline.executor import StageExecutor
from megamem.pipeline.freezing import check_stages_learn
from megamem.pipeline.hazards import check
from megamem.pipeline.placement import contiguous
from megamem.pipeline.program import Program, training_programs
from megamem.pipeline.schedule import Action, window_schedule
from megamem.pipeline.train_chunk import MicroBatch
from megamem.pipeline.warm_up import connect, rehearse
from megamem.pipeline.window import Window


def build_engine(config: RunConfig, topology: Topology, draw: bool = True) -> TrainingEngine:
    """Return the engine for the topology's pipeline size. See `TrainingEngine` for the arguments."""
    kind = WindowEngine if topology.pp_size == 1 else PipelineEngine
    return kind(config, topology, draw)


class WindowEngine(TrainingEngine):
    """The whole model on each rank (of a tensor-parallel group), ZeRO 0-3."""

    teacher: Teacher | None = None
    """Whose predictions the model learns too, if it has a teacher."""

    def __init__(self, config: RunConfig, topology: Topology, draw: bool) -> None:
        super().__init__(config, topology, None, draw)

    def module(self) -> nn.Module:
        """See `TrainingEngine.module`."""
        distill, model = self.config.training.distill, self.config.model
        if distill is not None:
            own = self.dtype, self.topology.device
            self.teacher = open_teacher(distill.teacher, distill.mixer, distill.weight, model, *own)
        return Window(self.stage, self.objective, self.teacher, self.config.training.window_order)

    def close(self) -> None:
        """See `TrainingEngine.close`; the teacher's weights are given back too."""
        super().close()
        if self.teacher is not None:
            for parameter in self.teacher.stage.parameters():
                parameter.data = parameter.new_empty(0)

    def backwards(self) -> int:
        """See `TrainingEngine.backwards`: one for each window."""
        return self.micro_batches * (self.config.chunks // self.config.bptt_chunks)

    def backward(
        self, micro_batches: Sequence[MicroBatch], predicted: Tensor, watch: Watch | None = None
    ) -> tuple[Tensor, dict[int, States]]:
        """See `TrainingEngine.backward`."""
        config = self.config
        # the loss is a mean over all predicted tokens; DeepSpeed averages over data-parallel ranks and backward calls
        scale = self.topology.dp_size * self.backwards() / predicted.clamp(min=1)
        sums = torch.zeros(len(self.loss_names), dtype=torch.float64, device=self.topology.device)
        states: dict[int, States] = {}
        current: States = {}
        taught: Tensor | None = None
        passes = list(window_schedule(len(micro_batches), config.chunks, config.bptt_chunks))
        for index, window in enumerate(passes):
            if watch is not None:
                watch(f"micro-batch {window.micro_batch}, chunks {window.first}-{window.last}")
            batch, places, reading, factor = micro_batches[window.micro_batch]
            if window.begins:
                current = self.states_before(window.micro_batch, batch)
                taught = None if self.teacher is None else self.teacher.read(batch.tokens, places)
            size = config.model.chunk_size
            tokens = slice(window.first * size, (window.last + 1) * size)
            loss, losses, current = self.engine(
                batch.tokens[tokens],
                batch.labels[tokens],
                places[window.first : window.last + 1],
                current,
                (factor * scale).float(),
                reading,
                None if taught is None else taught[tokens],
            )
            last = index == len(passes) - 1
            if last:
                self.sums.last_backward()
            self.engine.backward(loss)
            self.sums.after_backward()
            if not last:
                self.engine.step()  # counts the micro-step; updates nothing before the last
            sums += factor * losses.double()
            if self.carries:
                states[window.micro_batch] = current
        if self.observe_states is not None:
            self.observe_states(current)
        return sums, states


class PipelineEngine(TrainingEngine):
    """One stage of a pipeline, ZeRO 0 or 1: chunks up, gradients down, memory stays."""

    def __init__(self, config: RunConfig, topology: Topology, draw: bool) -> None:
        counts = place(config, topology)
        layers = contiguous(counts)
        check_stages_learn(config, layers)
        super().__init__(config, topology, layers[topology.pp_rank], draw)
        self.placement = layers
        self.executor = StageExecutor(
            self.stage, self.objective, topology.pp_rank, config.model.chunk_size, config.bptt_chunks
        )
        self.program = self._program()
        connect(topology)
        if topology.device.type == "cuda":
            self.rehearse()

    def _program(self) -> Program:
        """Return what this stage issues in a step."""
        config, stages = self.config, self.topology.pp_size
        found = training_programs(
            stages, self.micro_batches, config.chunks, config.bptt_chunks, config.interleaved, self.carries
        )
        check(found)
        return found[self.topology.pp_rank]

    def rehearse(self) -> None:
        """Run this stage once before anything is posted, on token 0, without a trace (`megamem.pipeline.warm_up`)."""
        config = self.config
        length, rows, size = config.data.sequence_length, config.training.micro_batch_size, config.model.chunk_size
        tokens = torch.zeros(length, rows, dtype=torch.int64, device=self.topology.device)
        starts = np.repeat(np.arange(0, length, size)[:, None], rows, axis=1)
        micro_batches, _, _ = self._read([Batch(tokens, tokens, starts, tuple(range(rows)))])
        rehearse(self.stage, self.objective, micro_batches, self.fresh_states(rows), size, config.bptt_chunks)
        if self.topology.device.type == "cuda":
            torch.cuda.synchronize(self.topology.device)

    def backwards(self) -> int:
        """See `TrainingEngine.backwards`: the executor accumulates, and DeepSpeed is called at the end of a step."""
        return 1

    def begin_phase(self, config: RunConfig) -> None:
        """See `TrainingEngine.begin_phase`."""
        super().begin_phase(config)
        self.executor.bptt_chunks = config.bptt_chunks
        self.program = self._program()

    def module(self) -> nn.Module:
        """See `TrainingEngine.module`."""
        if self.topology.last_stage:
            # the first stage's copies are those that count in norms
            for parameter in self.stage.tied_parameters:
                cast(Any, parameter).ds_pipe_replicated = True
        # likewise those of the first stage that has layers which share them
        for parameter in self.stage.repeated_parameters:
            cast(Any, parameter).ds_pipe_replicated = True
        return self.stage

    def backward(
        self, micro_batches: Sequence[MicroBatch], predicted: Tensor, watch: Watch | None = None
    ) -> tuple[Tensor, dict[int, States]]:
        """See `TrainingEngine.backward`."""
        topology = self.topology
        watch = watch or (lambda action: None)
        # the loss is a mean over all predicted tokens; DeepSpeed averages over data-parallel ranks
        scale = (topology.dp_size / predicted.clamp(min=1)).float()
        rows, units = micro_batches[0].batch.tokens.shape[1], len(micro_batches) * self.config.chunks
        size = self.config.model.chunk_size
        below, above = ([shape(size, rows)] * units for shape in (self.stage.border_shape, self.stage.shape_above))
        self.executor.observe_states = self.observe_states
        memories = self.executor.memory_shapes(rows, self.dtype)
        actions = (each for each in self.program if isinstance(each, Action))
        backwards = iter(range(sum(action.kind == "backward" for action in actions), 0, -1))
        sums, states = self.executor.run(
            micro_batches,
            lambda micro_batch: self.states_before(micro_batch, micro_batches[micro_batch].batch),
            scale,
            Borders(topology, self.program, below, above, self.dtype, memories),
            watch,
            lambda: self._before_backward(last=next(backwards) == 1),
            self.carries,
        )
        watch("reduction of gradients and losses over stages")
        dist.all_reduce(sums, group=topology.pp_group)
        self._sum_tied_gradients()
        self.sums.after_pipeline()
        return sums, states

    def _before_backward(self, last: bool) -> None:
        """Drop the BF16 gradients of the backward before: DeepSpeed's hooks have added them to FP32 sums.

        last: whether the one that comes is the last of the step.
        """
        if last:
            self.sums.last_backward()
        clear = getattr(self.engine.optimizer, "clear_lp_grads", None)
        if clear is not None:
            clear(set_to_none=True)

    def late_parameters(self) -> list[nn.Parameter]:
        """See `TrainingEngine.late_parameters`: what stages hold together is summed over them at the end."""
        tied = self.stage.tied_parameters if self.topology.ends_group is not None else []
        return [*tied, *self.stage.shared_parameters]

    def _sum_tied_gradients(self) -> None:
        """First and last stage each hold the tied parameters and a part of their gradients."""
        group = self.topology.ends_group
        if group is not None:
            for parameter in filter(lambda tied: tied.requires_grad, self.stage.tied_parameters):
                dist.all_reduce(getattr(parameter, "_hp_grad", parameter.grad), group=group)
        if self.stage.sharing_layers:
            self._sum_shared_gradients()

    def _sum_shared_gradients(self) -> None:
        """Each stage with layers that share parameters holds these, and a part of their gradients."""
        total = torch.zeros(shared_parameters(self.config.model) // self.topology.tp_size, device=self.topology.device)
        learning = [parameter for parameter in self.stage.shared_parameters if parameter.requires_grad]
        # stages without such layers, and frozen parameters, add nothing: all stages make the same call
        gradients = [cast(Tensor, getattr(parameter, "_hp_grad", parameter.grad)) for parameter in learning]
        # in one order on all stages; the last one, of rows that look ahead, is missing where no layer has such rows
        if gradients:
            own = torch.cat([gradient.flatten() for gradient in gradients]).float()
            total[: own.shape[0]] = own
        dist.all_reduce(total, group=self.topology.pp_group)
        start = 0
        for gradient in gradients:
            gradient.copy_(total[start : start + gradient.numel()].view_as(gradient))
            start += gradient.numel()
