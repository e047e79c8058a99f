"""The state of training that a run carries from step to step, as fragments of global tensors, under any layout.

Names: `master/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME` for the FP32 weights and Adam's moments of parameter NAME, of a
frozen one its weights alone, in the dtype that training computes with;
`states/layers.N/PART` for memory states that run on (see `checkpoints.states`); `rng/KIND/ROLE` for random generators;
`spikes/history` for the last steps' losses and gradient norms, where spikes are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from checkpoints.fragments import Fragments, Piece
from checkpoints.states import Lanes
from megamem.parallel.linears import info
from megamem.parallel.topology import Topology
from megamem.pipeline.base import TrainingEngine
from megamem.pipeline.freezing import frozen_part, learning

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's moments, as torch names them."""


@dataclass(frozen=True)
class _FlatRun:
    """A run of elements of one parameter that lies in one flat tensor of the optimizer."""

    name: str
    """Global name of the parameter."""
    parameter: nn.Parameter
    """The parameter, as the model holds it."""
    key: Tensor
    """The tensor under which the optimizer keeps its state."""
    at: int
    """First element in `key`, flattened."""
    start: int
    """First element in this rank's shard of the parameter, flattened."""
    count: int
    """Number of elements."""


def _flat_runs(engine: TrainingEngine) -> Iterator[_FlatRun]:
    """Yield where ZeRO keeps this rank's part of each parameter."""
    optimizer, stage = engine.engine.optimizer, engine.config.parallel.zero_stage
    for name, parameter in learning(engine.stage):
        if stage == 0:
            yield _FlatRun(name, parameter, parameter, 0, 0, parameter.numel())
        elif stage == 3:
            group, at, width = optimizer.grad_position[optimizer.get_param_id(parameter)]
            start = width * engine.topology.dp_rank
            count = min(width, parameter.ds_numel - start)  # type: ignore[attr-defined]
            if count > 0:
                yield _FlatRun(name, parameter, optimizer.fp32_partitioned_groups_flat[group], at, start, count)
        elif (mapping := cast(Any, parameter)._hp_mapping) is not None:
            group = mapping.param_group_index
            flat = getattr(optimizer, "single_partition_of_fp32_groups", None) or optimizer.fp32_groups_flat_partition
            place, source = mapping.hp_fragment_address, mapping.lp_fragment_address
            yield _FlatRun(name, parameter, flat[group], place.start, source.start, source.numel)


def optimizer_fragments(engine: TrainingEngine) -> dict[str, Fragments]:
    """Return FP32 weights and moments of this rank, and its part of frozen weights.

    Moments that do not exist yet are made (zeros).
    """
    topology, states = engine.topology, engine.optimizer.state
    fragments = _frozen_fragments(engine)
    for run in _flat_runs(engine):
        state = states[run.key]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=run.key.device)
            state |= {moment: torch.zeros_like(run.key) for moment in MOMENTS}
        tensors = {"master": run.key, **{moment: state[moment] for moment in MOMENTS}}
        shape = tuple(getattr(run.parameter, "ds_shape", run.parameter.shape))
        replica = getattr(run.parameter, "ds_pipe_replicated", False)
        # without ZeRO every data-parallel rank holds all of it
        spare = engine.config.parallel.zero_stage == 0 and topology.dp_rank > 0
        for kind, tensor in tensors.items():
            flat = tensor.detach().view(-1)[run.at : run.at + run.count]
            made = Fragments.of_flat(
                flat, run.start, shape, info(run.parameter).shard_axis, topology.tp_size, topology.tp_rank
            )
            made.writes &= not (replica or spare)
            fragments[f"{kind}/{run.name}"] = made
    return fragments


def _frozen_fragments(engine: TrainingEngine) -> dict[str, Fragments]:
    """Return this rank's part of the weights that do not learn: views of what the model computes with."""
    topology, zero = engine.topology, engine.config.parallel.zero_stage
    fragments: dict[str, Fragments] = {}
    for name, parameter in engine.parameters().items():
        if parameter.requires_grad:
            continue
        flat, start = frozen_part(parameter, topology.dp_rank)
        made = Fragments.of_flat(
            flat,
            start,
            tuple(getattr(parameter, "ds_shape", parameter.shape)),
            info(parameter).shard_axis,
            topology.tp_size,
            topology.tp_rank,
        )
        # below ZeRO 3 every data-parallel rank holds all of it
        made.writes &= not getattr(parameter, "ds_pipe_replicated", False) and (zero == 3 or topology.dp_rank == 0)
        fragments[f"master/{name}"] = made
    return fragments


def optimizer_steps(engine: TrainingEngine) -> int:
    """Return the number of updates that the optimizer has made (skipped steps are none)."""
    return max((int(state["step"]) for state in engine.optimizer.state.values() if state), default=0)


def set_optimizer_steps(engine: TrainingEngine, steps: int) -> None:
    """Set the count of Adam's bias correction, after a load."""
    for state in engine.optimizer.state.values():
        state["step"].fill_(steps)


def update_model_weights(engine: TrainingEngine) -> None:
    """Set the weights that the model computes with from the FP32 ones, after a load.

    A collective of the data-parallel ranks.
    """
    optimizer, stage = engine.engine.optimizer, engine.config.parallel.zero_stage
    if stage == 3:
        for group in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
    elif stage > 0:
        optimizer.update_lp_params()


def all_fragments(engine: TrainingEngine) -> dict[str, Fragments]:
    """Return all that a checkpoint holds, but for run.json. A collective of the data-parallel ranks."""
    return {
        **optimizer_fragments(engine),
        **Lanes.of(engine).fragments(engine.carried),
        **as_fragments(random_states(engine.topology)),
        **spike_fragments(engine),
    }


def spike_fragments(engine: TrainingEngine) -> dict[str, Fragments]:
    """Return what the search for spikes goes by, which all ranks hold alike; nothing where none are skipped."""
    if engine.spikes is None:
        return {}
    history = engine.spikes.history
    return {"spikes/history": Fragments(history.shape, [Piece((0, 0), history)], writes=engine.topology.rank == 0)}


def as_fragments(tensors: Mapping[str, Tensor]) -> dict[str, Fragments]:
    """Return vectors [N], of any dtype, that this rank alone holds as fragments."""
    return {name: Fragments(tensor.shape, [Piece((0,), tensor)]) for name, tensor in tensors.items()}


def random_states(topology: Topology) -> dict[str, Tensor]:
    """Return the states of this rank's random generators by name, on the CPU."""
    role = f"pp{topology.pp_rank}.dp{topology.dp_rank}.tp{topology.tp_rank}"
    states = {f"rng/cpu/{role}": torch.get_rng_state()}
    if topology.device.type == "cuda":
        states[f"rng/cuda/{role}"] = torch.cuda.get_rng_state(topology.device)
    return states


def set_random_states(topology: Topology, states: Mapping[str, Tensor]) -> None:
    """Set this rank's random generators, after a load. Those that a checkpoint of another layout lacks are left alone.

    states: [N] uint8 each, by name as in `random_states`.
    """
    for name, state in states.items():
        if name.startswith("rng/cuda/"):
            torch.cuda.set_rng_state(state, topology.device)
        else:
            torch.set_rng_state(state)
