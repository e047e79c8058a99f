"""Everything a run carries from step to step, as fragments of global tensors by name, under any layout.

Names: `master/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME` for the FP32 weights and Adam's moments of parameter NAME;
`states/layers.N/PART` for memory states that run on (streams); `rng/KIND/ROLE` for random generators.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from checkpoints.fragments import Fragments, Piece
from checkpoints.states import named_tensors
from megamem.memory.base import Growing, Mixer, State, TensorSpec
from megamem.model.block import Block
from megamem.parallel.linears import info
from megamem.parallel.topology import Topology
from megamem.pipeline.base import TrainingEngine

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class _Run:
    """Elements of one parameter in one flat tensor of the optimizer."""

    name: str
    parameter: nn.Parameter
    key: Tensor
    """What the optimizer keeps its state under."""
    at: int
    """First element in `key`, flattened."""
    start: int
    """First element in this rank's slice of the parameter, flattened."""
    count: int


def _runs(engine: TrainingEngine) -> Iterator[_Run]:
    """Where ZeRO keeps this rank's part of each parameter."""
    optimizer, stage = engine.engine.optimizer, engine.config.parallel.zero_stage
    for name, parameter in engine.parameters().items():
        if stage == 0:
            yield _Run(name, parameter, parameter, 0, 0, parameter.numel())
        elif stage == 3:
            group, at, width = optimizer.grad_position[optimizer.get_param_id(parameter)]
            start = width * engine.topology.dp_rank
            count = min(width, parameter.ds_numel - start)  # type: ignore[attr-defined]
            if count > 0:
                yield _Run(name, parameter, optimizer.fp32_partitioned_groups_flat[group], at, start, count)
        elif (mapping := cast(Any, parameter)._hp_mapping) is not None:
            group = mapping.param_group_index
            flat = getattr(optimizer, "single_partition_of_fp32_groups", None) or optimizer.fp32_groups_flat_partition
            place, source = mapping.hp_fragment_address, mapping.lp_fragment_address
            yield _Run(name, parameter, flat[group], place.start, source.start, source.numel)


def optimizer_fragments(engine: TrainingEngine) -> dict[str, Fragments]:
    """FP32 weights and moments of this rank; moments that do not exist yet are made (zeros)."""
    topology, states = engine.topology, engine.optimizer.state
    fragments: dict[str, Fragments] = {}
    for run in _runs(engine):
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


def optimizer_steps(engine: TrainingEngine) -> int:
    """Updates the optimizer has made (skipped steps are none)."""
    return max((int(state["step"]) for state in engine.optimizer.state.values() if state), default=0)


def set_optimizer_steps(engine: TrainingEngine, steps: int) -> None:
    """After a load: what Adam's bias correction counts."""
    for state in engine.optimizer.state.values():
        state["step"].fill_(steps)


def spread_masters(engine: TrainingEngine) -> None:
    """After a load: the weights the model computes with, from the FP32 ones. A collective of data-parallel ranks."""
    optimizer, stage = engine.engine.optimizer, engine.config.parallel.zero_stage
    if stage == 3:
        for group in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
    elif stage > 0:
        optimizer.update_lp_params()


def state_fragments(engine: TrainingEngine, carried: Mapping[int, list[State]]) -> dict[str, Fragments]:
    """Memory states of every lane: the batch axis is the row of the whole batch.

    Growing lists of lanes may have different lengths: they are filled up with zeros at their old end, and
    `NAME.entries` holds each row's own number. A collective of the data-parallel ranks where there are such lists.
    """
    pieces: dict[str, list[Piece]] = {}
    declared: dict[str, tuple[TensorSpec, Any]] = {}
    topology, micro = engine.topology, engine.config.training.micro_batch_size
    longest = _longest_lists(engine, carried)
    for sequence, states in carried.items():
        row = (sequence * topology.dp_size + topology.dp_rank) * micro
        for (layer, block), state in zip(engine.stage.layers.items(), states, strict=True):
            mixer, prefix = cast(Block, block).mixer, f"states/layers.{layer}/"
            for name, spec in mixer.specs.items():
                if isinstance(spec, Growing):
                    counts = torch.full((micro,), len(state[name]))
                    pieces.setdefault(f"{prefix}{name}.entries", []).append(Piece((row,), counts))
                    declared[f"{prefix}{name}.entries"] = TensorSpec(("batch",), "int64"), counts
                    missing = longest[layer, name] - len(state[name])
                    state = {**state, name: [*_empty_entries(engine, mixer, spec, missing), *state[name]]}
            for part, spec, tensor in named_tensors(mixer.specs, state):
                if not tensor.numel():
                    continue
                batch = spec.axis("batch")
                assert batch is not None, f"{part}: a state of lanes needs a batch axis"
                corner = [0] * tensor.ndim
                corner[batch] = row
                if (axis := spec.shard_axis) is not None:
                    corner[axis] = tensor.shape[axis] * topology.tp_rank
                pieces.setdefault(prefix + part, []).append(Piece(tuple(corner), tensor))
                declared[prefix + part] = spec, tensor
    return {
        name: Fragments(
            _whole_shape(*declared[name], engine.config.global_rows, topology),
            found,
            writes=declared[name][0].shard is not None or topology.tp_rank == 0,
        )
        for name, found in pieces.items()
    }


def _longest_lists(engine: TrainingEngine, carried: Mapping[int, list[State]]) -> dict[tuple[str, str], int]:
    """Per layer and growing list, most entries of any lane on any data-parallel rank."""
    lists = [
        (layer, name)
        for layer, block in engine.stage.layers.items()
        for name, spec in cast(Block, block).mixer.specs.items()
        if isinstance(spec, Growing)
    ]
    if not lists or not carried:
        return {}
    at = {layer: index for index, layer in enumerate(engine.stage.layers)}
    counts = [max(len(states[at[layer]][name]) for states in carried.values()) for layer, name in lists]
    agreed = torch.tensor(counts, device=engine.topology.device)
    dist.all_reduce(agreed, dist.ReduceOp.MAX, group=engine.topology.dp_group)
    return dict(zip(lists, agreed.tolist(), strict=True))


def _whole_shape(spec: TensorSpec, tensor: Tensor, rows: int, topology: Topology) -> list[int]:
    shape = list(tensor.shape)
    batch = spec.axis("batch")
    assert batch is not None
    shape[batch] = rows
    if (axis := spec.shard_axis) is not None:
        shape[axis] *= topology.tp_size
    return shape


def empty_states(engine: TrainingEngine, names: set[str]) -> dict[int, list[State]]:
    """States of this rank's lanes with room for what a checkpoint holds; none if it holds none.

    names: of the checkpoint's tensors, which say how many entries growing lists have at most. After the load,
    `drop_filling` takes out what was only filled up.
    """
    if not any(name.startswith("states/") for name in names):
        return {}
    carried = {}
    for sequence in range(engine.accumulation):
        states = engine.fresh_states(engine.config.training.micro_batch_size)
        for (layer, block), state in zip(engine.stage.layers.items(), states, strict=True):
            mixer = cast(Block, block).mixer
            for name, spec in mixer.specs.items():
                if isinstance(spec, Growing):
                    ages = re.compile(rf"states/layers\.{layer}/{re.escape(name)}\.(\d+)\.")
                    count = len({found[1] for entry in names if (found := ages.match(entry))})
                    state[name] = _empty_entries(engine, mixer, spec, count)
        carried[sequence] = states
    return carried


def drop_filling(engine: TrainingEngine, carried: Mapping[int, list[State]], loaded: Mapping[str, Fragments]) -> None:
    """Cut growing lists down to the entries their rows had when they were saved."""
    micro = engine.config.training.micro_batch_size
    for index, (sequence, states) in enumerate(carried.items()):
        for (layer, block), state in zip(engine.stage.layers.items(), states, strict=True):
            for name, spec in cast(Block, block).mixer.specs.items():
                if isinstance(spec, Growing):
                    counts = loaded[f"states/layers.{layer}/{name}.entries"].pieces[index].tensor
                    assert counts.shape == (micro,), f"sequence {sequence}"
                    own = int(counts.max())
                    state[name] = state[name][len(state[name]) - own :]


def _empty_entries(engine: TrainingEngine, mixer: Mixer, spec: Growing, count: int) -> list[dict[str, Tensor]]:
    """Zeros in the place of entries of a growing list."""
    rows, device = engine.config.training.micro_batch_size, engine.topology.device
    return [
        {part: mixer.zeros(declared, rows, device, engine.dtype) for part, declared in spec.entry.items()}
        for _ in range(count)
    ]


def as_fragments(tensors: Mapping[str, Tensor]) -> dict[str, Fragments]:
    """Vectors that this rank alone holds."""
    return {name: Fragments(tensor.shape, [Piece((0,), tensor)]) for name, tensor in tensors.items()}


def random_states(topology: Topology) -> dict[str, Tensor]:
    """This rank's random generators, by name; on the CPU."""
    role = f"pp{topology.pp_rank}.dp{topology.dp_rank}.tp{topology.tp_rank}"
    states = {f"rng/cpu/{role}": torch.get_rng_state()}
    if topology.device.type == "cuda":
        states[f"rng/cuda/{role}"] = torch.cuda.get_rng_state(topology.device)
    return states


def set_random_states(topology: Topology, states: Mapping[str, Tensor]) -> None:
    """After a load; what a checkpoint of another layout lacks is left as it is."""
    for name, state in states.items():
        if name.startswith("rng/cuda/"):
            torch.cuda.set_rng_state(state, topology.device)
        else:
            torch.set_rng_state(state)
